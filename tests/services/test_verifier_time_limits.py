"""A run near its time limit is repeated exclusively; clear timeouts and clear passes are not repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from nouscoder.domain.submission import Limits
from nouscoder.verifier.grading import time_limits
from nouscoder.verifier.grading.time_limits import (
    MAX_REPETITIONS_S,
    ExclusiveRunLock,
    ExclusiveRunTimeout,
    Repetitions,
    extended_limits,
    run_with_time_limits,
)
from nouscoder.verifier.sandbox.base import Exit, RunResult

LIMITS = Limits(wall_time_s=10, cpu_time_s=10)
GOOD = RunResult(Exit.EXITED, 0, 0, 1.0, 1.0, 1000, b"", b"")


def took(wall_s: float, cpu_s: float | None = None, exit: Exit = Exit.EXITED) -> RunResult:
    return replace(GOOD, wall_time_s=wall_s, cpu_time_s=wall_s if cpu_s is None else cpu_s, exit=exit)


@pytest.mark.parametrize(
    ("first", "second", "exit"),
    [
        (took(9.9), None, Exit.EXITED),
        (took(10.5), took(8.0), Exit.EXITED),
        (took(10.5), took(10.2), Exit.TIME_LIMIT),
        (took(10.5), took(11.5, exit=Exit.TIME_LIMIT), Exit.TIME_LIMIT),
        (took(11.0, 3.0), took(4.0, 3.0), Exit.EXITED),
        (took(9.0, 10.4), took(9.0, 9.9), Exit.EXITED),
        (took(11.5, exit=Exit.TIME_LIMIT), None, Exit.TIME_LIMIT),
        (took(11.0, exit=Exit.MEMORY_LIMIT), None, Exit.MEMORY_LIMIT),
        (took(10.5, exit=Exit.SIGNALLED), took(1.0, exit=Exit.SIGNALLED), Exit.SIGNALLED),
    ],
)
async def test_a_borderline_run_is_repeated(first: RunResult, second: RunResult | None, exit: Exit) -> None:
    results = [first] if second is None else [first, second]
    left = list(results)

    async def run() -> tuple[RunResult, str]:
        return left.pop(0), "ruling"

    result, ruling = await run_with_time_limits(run, LIMITS, ExclusiveRunLock(), Repetitions())
    assert (result.exit, left) == (exit, [])
    assert ruling == (None if exit is Exit.TIME_LIMIT and results[-1].exit is Exit.EXITED else "ruling")
    assert result.stdout == results[-1].stdout


def test_the_sandbox_enforces_the_limit_plus_the_borderline_share() -> None:
    assert (extended_limits(LIMITS).wall_time_s, extended_limits(LIMITS).memory_bytes) == (11.5, LIMITS.memory_bytes)


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_the_second_run_is_exclusive_and_other_runs_continue_after_it() -> None:
    """The invariant of time_limits.py."""
    run_lock = ExclusiveRunLock()
    running: set[str] = set()
    seen: list[set[str]] = []
    gates = {name: asyncio.Event() for name in ("long", "border", "late")}

    async def other(name: str) -> tuple[RunResult, None]:
        running.add(name)
        await gates[name].wait()
        running.remove(name)
        return GOOD, None

    async def borderline() -> tuple[RunResult, None]:
        seen.append(running | {"border"})
        if len(seen) == 1:
            return took(10.5), None
        running.add("border")
        await gates["border"].wait()
        running.remove("border")
        return GOOD, None

    long = asyncio.ensure_future(run_with_time_limits(lambda: other("long"), LIMITS, run_lock, Repetitions()))
    await settled(lambda: "long" in running)
    border = asyncio.ensure_future(run_with_time_limits(borderline, LIMITS, run_lock, Repetitions()))
    await settled(lambda: len(seen) == 1)
    await asyncio.sleep(0.01)
    late = asyncio.ensure_future(run_with_time_limits(lambda: other("late"), LIMITS, run_lock, Repetitions()))
    await asyncio.sleep(0.01)
    assert (running, len(seen)) == ({"long"}, 1)
    gates["long"].set()
    await settled(lambda: "border" in running)
    await asyncio.sleep(0.01)
    assert running == {"border"}
    gates["border"].set()
    gates["late"].set()
    assert [one.exit for one, _ in await asyncio.gather(long, border, late)] == [Exit.EXITED] * 3
    assert seen == [{"long", "border"}, {"border"}]


async def test_a_borderline_timeout_counts_when_the_machine_never_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nouscoder.verifier.grading.time_limits.EXCLUSIVE_PATIENCE_S", 0.02)
    run_lock = ExclusiveRunLock()
    async with run_lock.shared():

        async def run() -> tuple[RunResult, None]:
            return took(10.5), None

        assert (await run_with_time_limits(run, LIMITS, run_lock, Repetitions()))[0].exit is Exit.TIME_LIMIT
        with pytest.raises(ExclusiveRunTimeout):
            async with run_lock.exclusive(0.01):
                pass
    async with asyncio.timeout(60), run_lock.exclusive(1):
        await asyncio.sleep(0)
    async with asyncio.timeout(60), run_lock.shared():
        await asyncio.sleep(0)


async def test_a_silent_sandbox_in_the_second_run_is_an_infrastructure_failure() -> None:
    calls = 0

    async def run() -> tuple[RunResult, None]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise TimeoutError
        return took(10.5), None

    run_lock = ExclusiveRunLock()
    with pytest.raises(TimeoutError):
        await run_with_time_limits(run, LIMITS, run_lock, Repetitions())
    async with asyncio.timeout(60), run_lock.shared():
        await asyncio.sleep(0)


async def test_shared_runs_have_the_machine_for_a_while_after_an_exclusive_run() -> None:
    now_s = 100.0
    run_lock = ExclusiveRunLock(clock=lambda: now_s)
    async with run_lock.exclusive(1):
        now_s += 1.0
    assert run_lock._others.rest_until_s == 101.0 + 4.0
    async with run_lock.shared():
        pass
    now_s = 200.0
    async with run_lock.exclusive(1):
        now_s += 100.0  # it was alone for the first 5 s only
    assert run_lock._others.rest_until_s == 300.0 + 20.0
    async with run_lock.shared():
        with pytest.raises(ExclusiveRunTimeout):
            async with run_lock.exclusive(0.02):
                pass
        assert run_lock._open.is_set(), "shared runs are not blocked during the rest"
    async with asyncio.timeout(60), run_lock.exclusive(1):
        await asyncio.sleep(0)


async def repeated_beside(others: int, first: RunResult, repetitions: Repetitions | None = None) -> tuple[Exit, int]:
    """The exit of a run whose second try is good, with other runs in progress during the first; and its tries."""
    run_lock, ended = ExclusiveRunLock(), asyncio.Event()
    results = [GOOD, first]

    async def run() -> tuple[RunResult, None]:
        ended.set()
        return results.pop(), None

    async def other() -> None:
        async with run_lock.shared():
            await ended.wait()

    running = [asyncio.ensure_future(other()) for _ in range(others)]
    await asyncio.sleep(0)
    result, _ = await run_with_time_limits(run, LIMITS, run_lock, repetitions or Repetitions())
    await asyncio.gather(*running)
    return result.exit, 2 - len(results)


async def test_a_run_that_others_may_have_kept_from_the_cpu_is_repeated() -> None:
    starved = took(11.5, 0.2, Exit.TIME_LIMIT)
    assert await repeated_beside(1, starved) == (Exit.EXITED, 2)
    assert await repeated_beside(0, starved) == (Exit.TIME_LIMIT, 1), "nothing else took the CPU"
    assert await repeated_beside(1, took(11.5, 11.5, Exit.TIME_LIMIT)) == (Exit.TIME_LIMIT, 1)
    assert await repeated_beside(1, took(10.2, 10.0, Exit.TIME_LIMIT)) == (Exit.TIME_LIMIT, 1), "by its CPU limit"
    assert await repeated_beside(1, took(3.0, 12.0, Exit.TIME_LIMIT)) == (Exit.TIME_LIMIT, 1), "in several threads"
    kept = took(9.0, 6.0, Exit.TIME_LIMIT)
    assert await repeated_beside(1, kept) == (Exit.EXITED, 2), "gVisor's clock had counted what others used"
    assert await repeated_beside(0, kept) == (Exit.TIME_LIMIT, 1)
    assert await repeated_beside(1, starved, Repetitions(MAX_REPETITIONS_S)) == (Exit.TIME_LIMIT, 1)


async def test_other_runs_wait_for_an_exclusive_run_no_longer_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that sleeps until its limit of minutes is repeated, and the others go on meanwhile."""
    monkeypatch.setattr(time_limits, "ALONE_S", 0.01)
    run_lock = ExclusiveRunLock()
    async with asyncio.timeout(60), run_lock.exclusive(1), run_lock.shared() as beside:
        assert not beside.had_others
    async with asyncio.timeout(60), run_lock.shared(), run_lock.shared() as beside:
        assert beside.had_others


async def test_other_runs_wait_no_longer_than_a_bound_for_a_long_run_that_an_exclusive_one_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of minutes is in progress when another one is to be repeated alone."""
    monkeypatch.setattr(time_limits, "DRAIN_S", 0.01)
    run_lock, was_alone = ExclusiveRunLock(), False

    async def alone() -> None:
        nonlocal was_alone
        async with run_lock.exclusive(1000):
            was_alone = True

    async with asyncio.timeout(60):
        async with run_lock.shared():
            waiting = asyncio.ensure_future(alone())
            await settled(lambda: not run_lock._open.is_set())
            async with run_lock.shared():
                assert not was_alone
            assert run_lock._others.rest_until_s > 0, "they have the machine for a while"
        await waiting
    assert was_alone


async def test_the_repetitions_of_a_submission_are_bounded_together() -> None:
    """The wait for an exclusive run counts, so that a submission is never graded longer than its sandbox may take."""
    repetitions, left = Repetitions(), [GOOD, took(10.5)]

    async def run() -> tuple[RunResult, None]:
        await asyncio.sleep(0.001)
        return left.pop(), None

    await run_with_time_limits(run, LIMITS, ExclusiveRunLock(), repetitions)
    assert repetitions.spent_s > 0
    assert not repetitions.are_over
    repetitions.spent_s = MAX_REPETITIONS_S
    assert repetitions.are_over
