"""CISPO: REINFORCE on every token, with a clipped importance weight.

MiniMax, "MiniMax-M1", arXiv 2506.13585, equations 4 and 5. With d = pi_theta / pi_old and sg = stop-gradient, the mean
over the tokens of the minibatch is maximised of

    sg(clip(d, 1 - clip_low, 1 + clip_high)) * A * log pi_theta

The paper has no lower bound (clip_low = 1) and tunes clip_high without naming its value.
"""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.config import CispoSettings
from nouscoder.learner.objectives.base import Diagnostic, LossInputs, bounded_ratio
from nouscoder.learner.objectives.clip import Surrogate
from nouscoder.learner.objectives.composition import SurrogateObjective


@dataclass(frozen=True, slots=True)
class Cispo(SurrogateObjective[CispoSettings]):
    """The CISPO objective. bounded_fraction_low, bounded_fraction_high: share of tokens with a clipped weight."""

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens]."""
        low, high = 1.0 - self.settings.clip_low, 1.0 + self.settings.clip_high
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs).detach()
        return Surrogate(
            ratios.clamp(low, high) * inputs.advantages * inputs.logprobs,
            {"bounded_fraction_low": Diagnostic(ratios < low), "bounded_fraction_high": Diagnostic(ratios > high)},
        )
