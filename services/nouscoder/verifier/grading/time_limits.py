"""Time limits that do not depend on the load of the machine.

The sandbox enforces 15 % more than the limit, and the measured time decides. A run that ends within the limit keeps it.
A run that reaches the extended limit breaks it. Two kinds of runs are repeated with the machine to themselves, and the
second measurement counts: a run that ends between the limit and the extended limit, and a run that reached a limit with
little CPU time while other runs were in progress, because they may have taken the CPU. In gVisor, whose CPU clocks go
on while the host runs something else, the harness counts the CPU time of a run that reached a limit by the share of a
CPU that it could have (init/compile_time.c). The repetitions of a submission are bounded (`Repetitions`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from nouscoder.domain.submission import Limits
from nouscoder.verifier.grading.exclusive_run import ExclusiveRunLock, ExclusiveRunTimeout
from nouscoder.verifier.sandbox.base import Exit, RunResult

Ruling = TypeVar("Ruling")

log = logging.getLogger(__name__)

BORDERLINE = 0.15
EXCLUSIVE_PATIENCE_S = 60.0
LITTLE_CPU = 0.5  # a run that used a smaller share of its wall time waited: for the CPU, or for nothing
MAX_REPETITIONS_S = 60.0


@dataclass(slots=True)
class Repetitions:
    """The seconds that the repetitions of one submission have taken, with their waits.

    None begins after MAX_REPETITIONS_S seconds. Otherwise a program that sleeps in every test would be graded too long.
    """

    spent_s: float = 0.0

    @property
    def are_over(self) -> bool:
        """Whether no further repetition may begin."""
        return self.spent_s >= MAX_REPETITIONS_S


def max_repetitions_s(limits: Limits) -> float:
    """The longest time that all repetitions of a submission can take together [s]: the last may begin just in time."""
    return MAX_REPETITIONS_S + 2 * EXCLUSIVE_PATIENCE_S + extended_limits(limits).wall_time_s


@functools.lru_cache(maxsize=256)  # asked several times a run
def extended_limits(limits: Limits) -> Limits:
    """The limits that the sandbox enforces: the submission's own plus the borderline share."""
    more = 1 + BORDERLINE
    return replace(limits, wall_time_s=limits.wall_time_s * more, cpu_time_s=limits.cpu_time_s * more)


async def run_with_time_limits(
    run: Callable[[], Awaitable[tuple[RunResult, Ruling | None]]],
    limits: Limits,
    run_lock: ExclusiveRunLock,
    repetitions: Repetitions,
) -> tuple[RunResult, Ruling | None]:
    """The result that counts and its ruling. The ruling is None when the result breaks a time limit.

    `run` must enforce `extended_limits(limits)`. It is awaited once, or twice for a result that may be due to other
    runs. Exceptions of `run` propagate.
    """
    async with run_lock.shared() as shared:
        result, ruling = await run()
    doubtful = _is_late(result, limits) or (shared.had_others and _had_little_cpu(result, limits))
    if doubtful and not repetitions.are_over:
        try:
            async with repetition(run_lock, repetitions):
                result, ruling = await run()
        except ExclusiveRunTimeout:
            log.warning("a doubtful timeout counts: the machine did not become free for an exclusive run")
    return (replace(result, exit=Exit.TIME_LIMIT), None) if _is_late(result, limits) else (result, ruling)


@asynccontextmanager
async def repetition(run_lock: ExclusiveRunLock, repetitions: Repetitions) -> AsyncIterator[None]:
    """Hold the machine alone. Its time and the wait for it count. Raises ExclusiveRunTimeout."""
    begun_s = time.monotonic()
    try:
        async with run_lock.exclusive(EXCLUSIVE_PATIENCE_S):
            yield
    finally:
        repetitions.spent_s += time.monotonic() - begun_s


def _is_late(result: RunResult, limits: Limits) -> bool:
    """Whether the process ended by itself but over the limit."""
    ended = result.exit in (Exit.EXITED, Exit.SIGNALLED)
    return ended and (result.wall_time_s > limits.wall_time_s or result.cpu_time_s > limits.cpu_time_s)


def _had_little_cpu(result: RunResult, limits: Limits) -> bool:
    """Whether the process was killed for a time limit after it had used little CPU time.

    Below its wall time limit it was killed for its CPU limit. Less than that is little: gVisor's clock counted more.
    """
    by_wall = result.wall_time_s >= limits.wall_time_s
    enough_s = min(LITTLE_CPU * limits.wall_time_s, limits.cpu_time_s) if by_wall else limits.cpu_time_s
    return result.exit is Exit.TIME_LIMIT and result.cpu_time_s < enough_s
