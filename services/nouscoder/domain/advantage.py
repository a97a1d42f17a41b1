"""Advantages from rewards. Each estimator has its source; all give zeros for a group or batch without signal."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import isfinite, sqrt


class Estimator(StrEnum):
    """How an advantage is estimated; `group_advantages` and `batch_advantages` have the formulas."""

    GROUP_MEAN_STD = "group_mean_std"
    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    BATCH_WHITENED = "batch_whitened"
    BATCH_TOKEN_WHITENED = "batch_token_whitened"

    @property
    def is_of_batch(self) -> bool:
        """Whether the statistics are those of the whole batch, else those of each group."""
        return self in (Estimator.BATCH_WHITENED, Estimator.BATCH_TOKEN_WHITENED)


class Overlong(StrEnum):
    """What happens to overlong rollouts, which always count in the statistics.

    FILTERED: advantage 0, and their tokens count in the loss's divisor (NousCoder-14B, DeepCoder). MASKED: they are
    left out of the loss and its divisor (AReaL's mask_no_eos). KEPT: they are treated as any other.
    """

    FILTERED = "filtered"
    MASKED = "masked"
    KEPT = "kept"


# Rewards are equal when they differ by the rounding of float64 alone, whose unit is 1.1e-16: by no more than this share
# of the largest, for sums of a few thousand terms, or by no more than this, for terms near 1 that cancel to 0.
EQUAL_SHARE = 1e-12
EQUAL_DIFFERENCE = 1e-15
SCORE_DIGITS = 12  # shares from 0 to 1 that are equal in these digits differ by rounding alone


def has_signal(rewards: Sequence[float]) -> bool:
    """False when all rewards are equal but for rounding: all advantages are 0 (DAPO's dynamic sampling drops it)."""
    if len(rewards) < 2:
        return False
    low, high = min(rewards), max(rewards)
    return high - low > max(EQUAL_SHARE * max(-low, high), EQUAL_DIFFERENCE)


def group_advantages(
    rewards: Sequence[float],
    zeroed: Sequence[bool],
    estimator: Estimator = Estimator.GROUP_MEAN_STD,
    ddof: int = 0,
    epsilon: float = 0.0,
) -> list[float]:
    """The advantages [rollouts] of one group of n rollouts.

    GROUP_MEAN_STD: (R_i - mean R) / (std R + epsilon) (GRPO, arXiv 2402.03300, section 4.1.2, without epsilon); std
    divides by n - ddof. verl has ddof 1 and epsilon 1e-6 (compute_grpo_outcome_advantage in its core_algos.py).
    GROUP_MEAN: R_i - mean R (Dr. GRPO, arXiv 2503.20783, section 3.2).
    LEAVE_ONE_OUT: R_i - mean of the other R (RLOO, arXiv 2402.14740).

    Rollouts that are `zeroed` count in the statistics, then get 0. A group without signal gets zeros. Raises
    ValueError on unequal lengths, a reward that is not finite, or an estimator of the whole batch.
    """
    _check(rewards, zeroed)
    if estimator.is_of_batch:
        raise ValueError(f"{estimator} needs the rewards of the whole batch")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    count = len(rewards)
    mean = sum(rewards) / count
    scale = 1.0
    if estimator is Estimator.GROUP_MEAN_STD:
        scale = sqrt(sum((reward - mean) ** 2 for reward in rewards) / (count - ddof)) + epsilon
    elif estimator is Estimator.LEAVE_ONE_OUT:
        scale = (count - 1) / count  # R_i - (n * mean - R_i) / (n - 1) = (R_i - mean) * n / (n - 1)
    return [0.0 if cut else (reward - mean) / scale for reward, cut in zip(rewards, zeroed, strict=True)]


def batch_advantages(
    rewards: Sequence[float], zeroed: Sequence[bool], weights: Sequence[int], ddof: int = 0, epsilon: float = 0.0
) -> list[float]:
    """(R_i - mean R) / (std R + epsilon) over the rollouts of a batch, [rollouts] (REINFORCE++, arXiv 2501.03262).

    Rollout i counts `weights[i]` times: once, or once a token as OpenRLHF whitens. std divides by the sum of weights
    minus ddof. Otherwise as `group_advantages`.
    """
    _check(rewards, zeroed)
    if len(weights) != len(rewards):
        raise ValueError("rewards and weights differ in length")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    total = sum(weights)
    mean = sum(weight * reward for weight, reward in zip(weights, rewards, strict=True)) / total
    squares = sum(weight * (reward - mean) ** 2 for weight, reward in zip(weights, rewards, strict=True))
    std = sqrt(squares / (total - ddof)) + epsilon
    return [0.0 if cut else (reward - mean) / std for reward, cut in zip(rewards, zeroed, strict=True)]


def _check(rewards: Sequence[float], zeroed: Sequence[bool]) -> None:
    if len(rewards) != len(zeroed):
        raise ValueError("rewards and zeroed differ in length")
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError("a reward is not finite")
