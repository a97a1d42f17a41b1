"""How the values of loss tokens become one loss: the share of each token.

With N loss tokens and R rollouts in the minibatch and |o_i| loss tokens in rollout i:

    token_mean      s_t = 1 / N               DAPO, arXiv 2503.14476, equation 12
    sequence_mean   s_t = 1 / (R * |o_i|)     GRPO, arXiv 2402.03300, equation 3
    fixed_divisor   s_t = 1 / (R * D)         Dr. GRPO, arXiv 2503.20783, section 3.2; D = divisor_tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import Field

from nouscoder.objectives.base import LossInputs, MinibatchCounts, lengths_of_rollouts
from nouscoder.sections import Section

if TYPE_CHECKING:
    from nouscoder.objectives.base import Tensor


class Aggregation(StrEnum):
    """The kinds of shares."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    FIXED_DIVISOR = "fixed_divisor"


def aggregation_key(default: Aggregation) -> Any:
    """The key `aggregation` of an objective, with its published value."""
    return Field(
        default,
        description="token_mean: over all loss tokens; sequence_mean: over the tokens of each rollout, then over"
        " rollouts; fixed_divisor: the sum over tokens by rollouts * divisor_tokens",
    )


class AggregatedSection(Section):
    """The settings of the aggregation, which every objective has."""

    aggregation: Aggregation = aggregation_key(Aggregation.TOKEN_MEAN)
    divisor_tokens: int = Field(
        0, ge=0, description="for fixed_divisor: tokens by which each rollout's sum is divided, as the longest length"
    )

    def _faults(self) -> Iterator[str]:
        if (self.aggregation is Aggregation.FIXED_DIVISOR) != (self.divisor_tokens > 0):
            yield "divisor_tokens is for aggregation fixed_divisor, which needs it"

    def shares(self, inputs: LossInputs, counts: MinibatchCounts) -> Tensor:
        """The share of each token in the loss, [tokens], without gradient."""
        ones = inputs.old_logprobs.new_ones(inputs.old_logprobs.shape)
        if self.aggregation is Aggregation.TOKEN_MEAN:
            return ones / counts.num_tokens
        if self.aggregation is Aggregation.SEQUENCE_MEAN:
            return ones / (counts.num_rollouts * lengths_of_rollouts(ones, inputs.rollout_of_token))
        return ones / (counts.num_rollouts * self.divisor_tokens)
