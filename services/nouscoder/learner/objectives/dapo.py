"""DAPO: token-level policy gradient with a decoupled clip.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476: the objective is
equation 8, its ratio and advantage equation 9, the decoupled clip equation 10 and the token-level mean equation 12.
Group advantages (equation 9) and dynamic sampling (equation 11) are computed before: see domain/advantage.py and the
broker. With r = pi_theta / pi_old, A the token's advantage and N the loss tokens of the minibatch, to be maximised:

    1/N * sum over tokens of  w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

NousCoder-14B: w = min(2, pi_old / pi_sampler), which is the default of learner.correction. The tokens of overlong
rollouts have advantage 0: they add nothing to the sum, but they count in N.
"""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.config import DapoSettings
from nouscoder.learner.objectives.base import LossInputs
from nouscoder.learner.objectives.clip import Surrogate, clipped_token_ratios
from nouscoder.learner.objectives.composition import SurrogateObjective


@dataclass(frozen=True, slots=True)
class Dapo(SurrogateObjective[DapoSettings]):
    """The DAPO objective. Diagnostics: clip_fraction_low, clip_fraction_high (clip.py)."""

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped gain of each token, [tokens]."""
        return clipped_token_ratios(inputs, inputs.old_logprobs, self.settings)
