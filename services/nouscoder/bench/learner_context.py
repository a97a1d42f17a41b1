"""The longest rollout that a step of the learner can train on, within a device's memory.

The peak of a step's memory is the largest of several sums: weights, gradients and moments at the optimizer's step, or
weights and what grows with the tokens of a row in the backward pass. So it grows with the length ever faster, up to a
straight line, and the line through two steps is at most the truth: memory is full where it says, or before. Lengths are
doubled until that is nearer than twice the last one, because a step takes the longer the square of its length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_MULTIPLE = 1024
# The allocator and other users of the device leave about this much of its memory.
_USABLE = 0.97
_NEAR = 1 / 16
_MOST_TRIES = 8


@dataclass(frozen=True, slots=True)
class Try:
    """A step with a rollout of `length` tokens. The peak is 0 where memory is not measured, or did not suffice."""

    length: int
    fits: bool
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LargestContext:
    """`fits` tokens fit, 0: none was seen to. `fails` is the shortest length that did not fit, 0: none was tried."""

    fits: int
    fails: int
    tries: tuple[Try, ...]


def largest_context(
    attempt: Callable[[int], int | None], capacity: int, first: int, limit_s: float, tell: Callable[[str], None]
) -> LargestContext:
    """Try lengths from `first` on until one does not fit, or `limit_s` would be exceeded.

    `attempt` trains on a rollout of a length, and returns the peak of memory, or None when it does not fit. `capacity`
    is the memory of the device. Each try is told.
    """
    tries: list[Try] = []
    ends = time.monotonic() + limit_s
    length = first
    while len(tries) < _MOST_TRIES:
        begun = time.monotonic()
        peak = attempt(length)
        tries.append(Try(length, peak is not None, peak or 0, time.monotonic() - begun))
        memory = "does not fit" if peak is None else f"peak {peak / 2**30:.1f} GiB"
        tell(f"context     {length} tokens: {memory}, {tries[-1].seconds:.1f} s")
        following = _next_length(tries, capacity)
        if following is None or time.monotonic() + _longest_s(tries, following) > ends:
            break
        length = following
    fitting = [one.length for one in tries if one.fits]
    failing = [one.length for one in tries if not one.fits]
    return LargestContext(max(fitting, default=0), min(failing, default=0), tuple(tries))


def _next_length(tries: list[Try], capacity: int) -> int | None:
    """The next length to try; None when the largest is known to a sixteenth."""
    fitting = sorted((one.length, one.peak_bytes) for one in tries if one.fits)
    failing = min((one.length for one in tries if not one.fits), default=0)
    if not fitting:
        return _rounded(failing / 2) or None
    longest = fitting[-1][0]
    if failing:
        return None if failing - longest <= failing * _NEAR else _rounded((longest + failing) / 2)
    if len(fitting) < 2 or fitting[-1][1] == fitting[-2][1]:
        return 2 * longest
    (short, of_short), (long, of_long) = fitting[-2:]
    estimate = _rounded(long + (capacity * _USABLE - of_long) * (long - short) / (of_long - of_short))
    # After a length near the estimate has fit, a sixteenth more is tried.
    return min(2 * longest, max(estimate, _rounded(longest * (1 + _NEAR))))


def _longest_s(tries: list[Try], length: int) -> float:
    """A step of this length takes at most the square of the lengths' ratio as long as the last one."""
    last = tries[-1]
    return last.seconds * max(1.0, length / last.length) ** 2


def _rounded(length: float) -> int:
    return int(length) // _MULTIPLE * _MULTIPLE
