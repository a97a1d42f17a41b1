"""REINFORCE++: PPO's clip without a critic, with advantages whitened over the batch.

Hu et al., "REINFORCE++", arXiv 2501.03262; AceCoder uses it. To be maximised over the R rollouts of the minibatch:

    1/R * sum over rollouts i of 1/|o_i| * sum over tokens of  min(r * A_i, clip(r, 1 - e, 1 + e) * A_i)

with r = pi_theta / pi_old, e = 0.2 and A_i = (R_i - mean R) / std R over the batch: learner.advantage.estimator is
batch_whitened, or batch_token_whitened as OpenRLHF computes it. The paper's optional KL in the reward of each token is
not built; learner.reference_kl puts a KL in the loss instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.config import ReinforcePlusPlusSettings
from nouscoder.learner.objectives.base import LossInputs
from nouscoder.learner.objectives.clip import Surrogate, clipped_token_ratios
from nouscoder.learner.objectives.composition import SurrogateObjective


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus(SurrogateObjective[ReinforcePlusPlusSettings]):
    """The REINFORCE++ objective. Diagnostics: clip_fraction_low, clip_fraction_high (clip.py)."""

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped gain of each token, [tokens]."""
        return clipped_token_ratios(inputs, inputs.old_logprobs, self.settings)
