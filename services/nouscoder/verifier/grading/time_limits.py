"""Time limits that do not depend on the load of the machine.

The sandbox enforces 15 % more than the limit, and the measured time decides. A run that ends within the limit keeps it.
A run that reaches the extended limit breaks it. A run that ends between the two is repeated with the machine to itself,
and the second measurement counts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from nouscoder.domain.submission import Limits
from nouscoder.verifier.grading.exclusive_run import ExclusiveRunLock, ExclusiveRunTimeout
from nouscoder.verifier.sandbox.base import Exit, RunResult

Ruling = TypeVar("Ruling")

log = logging.getLogger(__name__)

BORDERLINE = 0.15
EXCLUSIVE_PATIENCE_S = 60.0


def extended_limits(limits: Limits) -> Limits:
    """The limits that the sandbox enforces: the submission's own plus the borderline share."""
    more = 1 + BORDERLINE
    return replace(limits, wall_time_s=limits.wall_time_s * more, cpu_time_s=limits.cpu_time_s * more)


async def run_with_time_limits(
    run: Callable[[], Awaitable[tuple[RunResult, Ruling | None]]], limits: Limits, run_lock: ExclusiveRunLock
) -> tuple[RunResult, Ruling | None]:
    """The result that counts and its ruling. The ruling is None when the result breaks a time limit.

    `run` must enforce `extended_limits(limits)`. It is awaited once, or twice for a borderline result. Exceptions of
    `run` propagate.
    """
    async with run_lock.shared():
        result, ruling = await run()
    if not _is_late(result, limits):
        return result, ruling
    try:
        async with run_lock.exclusive(EXCLUSIVE_PATIENCE_S):
            result, ruling = await run()
    except ExclusiveRunTimeout:
        log.warning("a borderline timeout counts: the machine did not become free for an exclusive run")
    return (replace(result, exit=Exit.TIME_LIMIT), None) if _is_late(result, limits) else (result, ruling)


def _is_late(result: RunResult, limits: Limits) -> bool:
    """Whether the process ended by itself but over the limit."""
    ended = result.exit in (Exit.EXITED, Exit.SIGNALLED)
    return ended and (result.wall_time_s > limits.wall_time_s or result.cpu_time_s > limits.cpu_time_s)
