"""Time limits that do not depend on who else was running.

A run gets 15 % more time than its limit, and is judged by what it measured: one that ended within the limit has kept
it, one that was still running at the end of the extra time has broken it, and one that ended between the two is run
again alone, and what it needs then counts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from nouscoder.domain.submission import Limits
from nouscoder.verifier.grading.exclusive_run import Crowd, NeverAlone
from nouscoder.verifier.sandbox.base import Exit, RunResult

Ruling = TypeVar("Ruling")

log = logging.getLogger(__name__)

BORDERLINE = 0.15
ALONE_PATIENCE_S = 60.0


def stretched(limits: Limits) -> Limits:
    """What the sandbox enforces: the limits and the borderline above them."""
    more = 1 + BORDERLINE
    return replace(limits, wall_time_s=limits.wall_time_s * more, cpu_time_s=limits.cpu_time_s * more)


async def run_timed(
    run: Callable[[], Awaitable[tuple[RunResult, Ruling | None]]], limits: Limits, crowd: Crowd
) -> tuple[RunResult, Ruling | None]:
    """The result that counts, and what else `run` says of it, which is None of a result that is late.

    `run` must enforce `stretched(limits)`; it is awaited once, or twice when borderline. Raises what it raises.
    """
    async with crowd.among_others():
        result, ruling = await run()
    if not _is_late(result, limits):
        return result, ruling
    try:
        async with crowd.alone(ALONE_PATIENCE_S):
            result, ruling = await run()
    except NeverAlone:
        log.warning("a borderline time-out counts: the machine was never free to run it alone")
    return (replace(result, exit=Exit.TIME_LIMIT), None) if _is_late(result, limits) else (result, ruling)


def _is_late(result: RunResult, limits: Limits) -> bool:
    """Ended by itself, but over the limit."""
    ended = result.exit in (Exit.EXITED, Exit.SIGNALLED)
    return ended and (result.wall_time_s > limits.wall_time_s or result.cpu_time_s > limits.cpu_time_s)
