"""PPO's clip, with the proximal policy decoupled from the sampler or not.

Schulman et al., arXiv 1707.06347, equation 7; decoupled by Hilton et al., arXiv 2110.00641, as AReaL uses it, arXiv
2505.24298, equation 5. The gain of a token, with A its advantage and w the weight of the correction:

    proximal old      w * min(u * A, clip(u, 1 - e, 1 + e) * A),  u = pi_theta / pi_old,  w from pi_old / pi_sampler
    proximal sampler  min(u * A, clip(u, 1 - e, 1 + e) * A),      u = pi_theta / pi_sampler

pi_old is the policy at the start of the batch. The decoupled form as published has learner.correction.kind token, that
is w = pi_old / pi_sampler; other kinds bound it. The form with proximal sampler has no correction.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from nouscoder.objectives.base import LossInputs
from nouscoder.objectives.clip import ClippedObjective
from nouscoder.objectives.loss import NAME

if TYPE_CHECKING:
    from nouscoder.objectives.base import Tensor


class Proximal(StrEnum):
    """The policy in the denominator of PPO's clipped ratio."""

    OLD = "old"
    SAMPLER = "sampler"


class Ppo(ClippedObjective):
    """PPO's clip, with the proximal policy decoupled from the sampler (AReaL) or not."""

    name: Literal["ppo"] = Field("ppo", description=NAME)
    proximal: Proximal = Field(
        Proximal.OLD, description="denominator of the ratio; old: the policy at the batch's start; sampler: as sampled"
    )

    def denominator(self, inputs: LossInputs) -> Tensor:
        """The log-probabilities of the proximal policy, [tokens]."""
        return inputs.sampler_logprobs if self.proximal is Proximal.SAMPLER else inputs.old_logprobs
