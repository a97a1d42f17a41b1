"""Group-relative advantages (GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.2) with DAPO's filters."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt


def has_signal(rewards: Sequence[float]) -> bool:
    """False when every reward of the group is equal: its advantages are all 0 (DAPO's dynamic sampling drops it)."""
    return len(rewards) > 1 and max(rewards) > min(rewards)


def group_advantages(rewards: Sequence[float], overlong: Sequence[bool]) -> list[float]:
    """A_i = (R_i - mean R) / std R within the group, [rollouts].

    Overlong rollouts count in the mean and the (population) standard deviation, then get 0 (NousCoder's overlong
    filtering). A group without signal gets zeros. Raises ValueError on unequal lengths or a reward that is not finite.
    """
    if len(rewards) != len(overlong):
        raise ValueError("rewards and overlong differ in length")
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError("a reward is not finite")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    std = sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [0.0 if cut else (reward - mean) / std for reward, cut in zip(rewards, overlong, strict=True)]
