"""REINFORCE++: GRPO's formula without the KL, with advantages whitened over the batch.

Hu et al., "REINFORCE++", arXiv 2501.03262; AceCoder uses it. A_i = (R_i - mean R) / std R over the batch:
learner.advantage.estimator is batch_whitened, or batch_token_whitened as OpenRLHF computes it. The paper's optional KL
in the reward of each token is not built; learner.reference_kl puts a KL in the loss instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field

from nouscoder.objectives.aggregation import Aggregation, aggregation_key
from nouscoder.objectives.clip import ClippedObjective
from nouscoder.objectives.loss import NAME


class ReinforcePlusPlus(ClippedObjective):
    """REINFORCE++ (AceCoder): PPO's clip without a critic; set learner.advantage.estimator to batch_whitened."""

    name: Literal["reinforce_plus_plus"] = Field("reinforce_plus_plus", description=NAME)
    aggregation: Aggregation = aggregation_key(Aggregation.SEQUENCE_MEAN)

    @classmethod
    def published(cls) -> Mapping[str, Self]:
        """REINFORCE++."""
        return {"reinforce++": cls()}
