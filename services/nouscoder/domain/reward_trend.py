"""Whether the reward rises during a training: the last third of its batches against the first third.

For each problem that both thirds have: the mean reward of its rollouts in the last third minus that in the first. The
gain is the mean of these differences over problems, with a bootstrap interval over problems (bootstrap.py). A problem
is compared only with itself, so it does not matter which problems a batch has, or how hard they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.bootstrap import bootstrap_interval

TEST = (
    "mean over problems of (reward in the last third of the batches - reward in the first third),"
    " 95 % bootstrap interval over problems"
)


class Direction(StrEnum):
    """RISES: the interval is above 0. FALLS: it is below 0. UNDECIDED: it holds 0."""

    RISES = "rises"
    FALLS = "falls"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class RewardTrend:
    """`first` and `last` are the mean rewards of the problems in the two thirds; `low` and `high` bound the gain."""

    num_problems: int
    first: float
    last: float
    gain: float
    low: float
    high: float

    @property
    def direction(self) -> Direction:
        """What the interval says."""
        if self.low > 0:
            return Direction.RISES
        return Direction.FALLS if self.high < 0 else Direction.UNDECIDED


@dataclass(frozen=True, slots=True)
class BatchRewards:
    """The rewards of the rollouts of one batch, by problem."""

    batch_id: int
    rewards: dict[str, tuple[float, ...]]


def reward_trend(batches: Sequence[BatchRewards], num_batches: int, seed: int = 0) -> RewardTrend:
    """The trend over a training of `num_batches`. Raises ValueError when no problem is in both thirds."""
    third = num_batches // 3
    first = _means(batch for batch in batches if batch.batch_id < third)
    last = _means(batch for batch in batches if batch.batch_id >= num_batches - third)
    common = sorted(first.keys() & last.keys())
    if not common:
        raise ValueError(f"no problem is in both the first and the last {third} of {num_batches} batches")
    gains = [last[name] - first[name] for name in common]
    low, high = bootstrap_interval(gains, seed)
    return RewardTrend(
        num_problems=len(common),
        first=_mean([first[name] for name in common]),
        last=_mean([last[name] for name in common]),
        gain=_mean(gains),
        low=low,
        high=high,
    )


def _means(batches: Iterable[BatchRewards]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for batch in batches:
        for name, rewards in batch.rewards.items():
            found.setdefault(name, []).extend(rewards)
    return {name: _mean(rewards) for name, rewards in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
