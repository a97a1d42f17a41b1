"""GRPO: PPO's clip, and the mean over the tokens of each rollout.

Shao et al., "DeepSeekMath", arXiv 2402.03300, equation 3, with group advantages. To be maximised, with r = pi_theta /
pi_old, A the token's advantage, R rollouts of |o_i| loss tokens in the minibatch and e = 0.2:

    1/R * sum over rollouts i of 1/|o_i| * sum over tokens of  min(r * A, clip(r, 1 - e, 1 + e) * A) - beta * kl

beta * kl is learner.reference_kl, off by default; the paper has beta = 0.04 and the estimator k3. GRPO+ (DeepCoder) is
GRPO with clip_high = 0.28, aggregation token_mean and learner.advantage.overlong masked; it has no KL and no entropy
bonus.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field

from nouscoder.objectives.aggregation import Aggregation, aggregation_key
from nouscoder.objectives.clip import ClippedObjective
from nouscoder.objectives.loss import NAME


class Grpo(ClippedObjective):
    """GRPO (DeepSeekMath): PPO's clip, mean over the tokens of each rollout; GRPO+ sets clip_high and token_mean."""

    name: Literal["grpo"] = Field("grpo", description=NAME)
    aggregation: Aggregation = aggregation_key(Aggregation.SEQUENCE_MEAN)

    @classmethod
    def published(cls) -> Mapping[str, Self]:
        """GRPO and GRPO+."""
        return {"grpo": cls(), "grpo+": cls(clip_high=0.28, aggregation=Aggregation.TOKEN_MEAN)}
