"""GRPO: PPO's clip with group advantages, and the mean over the tokens of each rollout.

Shao et al., "DeepSeekMath", arXiv 2402.03300, equation 3. With r = pi_theta / pi_old and the minibatch's R rollouts, to
be maximised:

    1/R * sum over rollouts i of 1/|o_i| * sum over tokens of  min(r * A, clip(r, 1 - e, 1 + e) * A) - beta * kl

with e = 0.2. beta * kl is learner.reference_kl, off by default; the paper has beta = 0.04 and the estimator k3.

GRPO+ (DeepCoder) is GRPO with clip_high = 0.28, aggregation token_mean and learner.advantage.overlong masked; it has no
KL and no entropy bonus.
"""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.config import GrpoSettings
from nouscoder.learner.objectives.base import LossInputs
from nouscoder.learner.objectives.clip import Surrogate, clipped_token_ratios
from nouscoder.learner.objectives.composition import SurrogateObjective


@dataclass(frozen=True, slots=True)
class Grpo(SurrogateObjective[GrpoSettings]):
    """The GRPO objective. Diagnostics: clip_fraction_low, clip_fraction_high (clip.py)."""

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped gain of each token, [tokens]."""
        return clipped_token_ratios(inputs, inputs.old_logprobs, self.settings)
