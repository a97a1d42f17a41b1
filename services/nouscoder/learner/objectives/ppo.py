"""PPO's clip, with a proximal policy that may differ from the sampler.

Schulman et al., arXiv 1707.06347, equation 7; decoupled by Hilton et al., arXiv 2110.00641, as AReaL uses it,
arXiv 2505.24298, equation 5. To be maximised, as a mean over the tokens of the minibatch:

    proximal old      w * min(u * A, clip(u, 1 - e, 1 + e) * A),  u = pi_theta / pi_old,  w from pi_old / pi_sampler
    proximal sampler  min(u * A, clip(u, 1 - e, 1 + e) * A),      u = pi_theta / pi_sampler

pi_old is the policy at the start of the batch. The decoupled form as published has learner.correction.kind token, that
is w = pi_old / pi_sampler; other kinds bound it. The form with proximal sampler has no correction. dual_clip is that of
Ye et al. (clip.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.config import PpoSettings, Proximal
from nouscoder.learner.objectives.base import LossInputs
from nouscoder.learner.objectives.clip import Surrogate, clipped_token_ratios
from nouscoder.learner.objectives.composition import SurrogateObjective


@dataclass(frozen=True, slots=True)
class Ppo(SurrogateObjective[PpoSettings]):
    """The PPO objective. Diagnostics: clip_fraction_low, clip_fraction_high, clip_fraction_dual (clip.py)."""

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped gain of each token, [tokens]."""
        decoupled = self.settings.proximal is Proximal.OLD
        return clipped_token_ratios(
            inputs, inputs.old_logprobs if decoupled else inputs.sampler_logprobs, self.settings
        )
