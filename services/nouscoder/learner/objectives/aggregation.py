"""How the values of loss tokens become one loss.

A loss is the sum over tokens of share_t * value_t. With N loss tokens and R rollouts in the minibatch and |o_i| loss
tokens in rollout i:

    token_mean      share_t = 1 / N               DAPO, arXiv 2503.14476, equation 12
    sequence_mean   share_t = 1 / (R * |o_i|)     GRPO, arXiv 2402.03300, equation 3
    fixed_divisor   share_t = 1 / (R * D)         Dr. GRPO, arXiv 2503.20783, section 3.2; D = divisor_tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from nouscoder.config import Aggregation, ObjectiveSettings
from nouscoder.learner.objectives.base import LossInputs, MinibatchCounts
from nouscoder.learner.objectives.ratios import lengths_of_rollouts


def shares_of_tokens(settings: ObjectiveSettings, inputs: LossInputs, counts: MinibatchCounts) -> Tensor:
    """The share of each token in the loss, [tokens], without gradient."""
    ones = torch.ones_like(inputs.old_logprobs)
    if settings.aggregation is Aggregation.TOKEN_MEAN:
        return ones / counts.num_tokens
    if settings.aggregation is Aggregation.SEQUENCE_MEAN:
        return ones / (counts.num_rollouts * lengths_of_rollouts(ones, inputs.rollout_of_token))
    return ones / (counts.num_rollouts * settings.divisor_tokens)
