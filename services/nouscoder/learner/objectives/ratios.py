"""Importance ratios from log-probabilities, for each token and for each rollout."""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is 4.9e8, far above any clip. Its products with advantages are finite in float32.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """exp of log-ratios, which are clipped to +-MAX_LOG_RATIO. Beyond it the gradient is 0."""
    return torch.exp(torch.clamp(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def bounded_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator) of log-probabilities [tokens], bounded as `bounded_exp`."""
    return bounded_exp(numerator - denominator)


def sums_of_rollouts(values: Tensor, rollout_of_token: Tensor) -> Tensor:
    """The sum of `values` [tokens] over each token's rollout, repeated for each token, [tokens]."""
    if not values.numel():
        return values
    sums = values.new_zeros(int(rollout_of_token[-1]) + 1).index_add(0, rollout_of_token, values)
    return sums[rollout_of_token]


def lengths_of_rollouts(values: Tensor, rollout_of_token: Tensor) -> Tensor:
    """|o_i|: the number of loss tokens of each token's rollout, [tokens], in the type of `values`."""
    return sums_of_rollouts(torch.ones_like(values), rollout_of_token).detach()


def means_of_rollouts(values: Tensor, rollout_of_token: Tensor) -> Tensor:
    """The mean of `values` [tokens] over each token's rollout, repeated for each token, [tokens]."""
    return sums_of_rollouts(values, rollout_of_token) / lengths_of_rollouts(values, rollout_of_token)
