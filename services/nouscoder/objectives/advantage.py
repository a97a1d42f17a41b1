"""Advantages from rewards. Each estimator has its source; all give zeros for a group or batch without signal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import isfinite, sqrt

from pydantic import Field

from nouscoder.domain.signal import has_signal
from nouscoder.sections import Section


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


class AdvantageSection(Section):
    """How rewards become advantages."""

    estimator: Estimator = Field(
        Estimator.GROUP_MEAN_STD,
        description="group_mean_std: (R - mean) / std; group_mean: R - mean; leave_one_out: R - mean of the others;"
        " batch_whitened: (R - mean) / std over the batch's rollouts; batch_token_whitened: weighted by tokens",
    )
    ddof: int = Field(0, ge=0, le=1, description="std divides by n - ddof: 0 population, 1 sample")
    overlong: Overlong = Field(
        Overlong.FILTERED,
        description="rollouts cut at max_new_tokens; filtered: advantage 0, counted in the loss's divisor;"
        " masked: left out of the loss and its divisor; kept: as any other",
    )
    epsilon: float = Field(0.0, ge=0, allow_inf_nan=False, description="added to the std; verl's GRPO has 1e-6")
    mask_equal_rewards: bool = Field(
        False,
        description="groups of equal rewards are left out of the loss and its divisor, and no others take their place,"
        " as verl's rejection of samples; for broker.drop_zero_variance false, which keeps them in the batch",
    )
    length_weight: float = Field(
        0.0, ge=0, description="weight of Kimi k1.5's length reward, added before the estimator; 0: none"
    )

    def _faults(self) -> Iterator[str]:
        if self.mask_equal_rewards and self.estimator.is_of_batch:
            yield f"mask_equal_rewards is for estimators of a group: with {self.estimator} such groups have a signal"
        if (self.ddof or self.epsilon) and self.estimator in (Estimator.GROUP_MEAN, Estimator.LEAVE_ONE_OUT):
            yield f"ddof and epsilon have no effect with estimator {self.estimator}: leave them at 0"


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
