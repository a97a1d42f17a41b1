"""CISPO: REINFORCE on every token, with a clipped importance weight.

MiniMax, "MiniMax-M1", arXiv 2506.13585, equations 4 and 5. With d = pi_theta / pi_old, A the token's advantage and sg =
stop-gradient, the mean over the tokens of the minibatch is maximised of

    sg(clip(d, 1 - clip_low, 1 + clip_high)) * A * log pi_theta

The paper has no lower bound (clip_low = 1) and tunes clip_high without naming its value.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nouscoder.objectives.base import LossInputs, Surrogate, bounded_ratio
from nouscoder.objectives.clip import Outside, clip_high_key
from nouscoder.objectives.loss import NAME, ObjectiveSection


class Cispo(ObjectiveSection):
    """CISPO (MiniMax-M1): REINFORCE with a clipped importance weight. The paper names no value of clip_high."""

    name: Literal["cispo"] = Field("cispo", description=NAME)
    clip_low: float = Field(1.0, gt=0, le=1, description="weights are clipped from below at 1 - clip_low; 1: none")
    clip_high: float = clip_high_key(0.28)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gain of each token, [tokens].

        Diagnostics: bounded_fraction_low, bounded_fraction_high (tokens with a clipped weight).
        """
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        ratios = bounded_ratio(inputs.logprobs, inputs.old_logprobs).detach()
        gains = ratios.clamp(low, high) * inputs.advantages * inputs.logprobs
        return Surrogate(gains, Outside(ratios < low, ratios > high).diagnostics("bounded_fraction"))
