"""GSPO: one importance ratio for each rollout.

Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071, equations 5 and 7. To be maximised, with R
rollouts of |o_i| loss tokens in the minibatch and the advantage A_i of a rollout:

    s_i = exp(1/|o_i| * sum over tokens of log(pi_theta / pi_old))
    1/R * sum over rollouts i of  min(s_i * A_i, clip(s_i, 1 - clip_low, 1 + clip_high) * A_i)

The gain of a rollout is repeated for each of its tokens, so that the mean over its tokens (aggregation sequence_mean)
is the gain itself. GSPO+ (NousCoder-14B) weights rollouts by length, which is the mean over all tokens (aggregation
token_mean):

    sum over rollouts of |o_i| * min(s_i * A_i, clip(...) * A_i) / sum over rollouts of |o_i|
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field

from nouscoder.objectives.aggregation import Aggregation, aggregation_key
from nouscoder.objectives.base import LossInputs, Surrogate, bounded_exp, means_of_rollouts
from nouscoder.objectives.clip import clip_high_key, clip_low_key, clipped
from nouscoder.objectives.loss import NAME, ObjectiveSection


class Gspo(ObjectiveSection):
    """GSPO: one clipped ratio for each rollout. GSPO+ is GSPO with aggregation token_mean."""

    name: Literal["gspo"] = Field("gspo", description=NAME)
    clip_low: float = clip_low_key(3e-4)
    clip_high: float = clip_high_key(4e-4)
    aggregation: Aggregation = aggregation_key(Aggregation.SEQUENCE_MEAN)

    @classmethod
    def published(cls) -> Mapping[str, Self]:
        """GSPO and GSPO+."""
        return {"gspo": cls(), "gspo+": cls(aggregation=Aggregation.TOKEN_MEAN)}

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped gain of each token's rollout, [tokens].

        Diagnostics: clip_fraction_low, clip_fraction_high, of tokens.
        """
        log_ratios = means_of_rollouts(inputs.logprobs - inputs.old_logprobs, inputs.rollout_of_token)
        return clipped(bounded_exp(log_ratios), inputs.advantages, self.clip_low, self.clip_high)
