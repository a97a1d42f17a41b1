"""Whether rewards differ: only then a group or a batch has a signal, and advantages other than 0."""

from __future__ import annotations

from collections.abc import Sequence

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
