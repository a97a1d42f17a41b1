"""Time-outs near the limit are run again alone; clear ones and clear passes are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from nouscoder.domain.submission import Limits
from nouscoder.verifier.grading.exclusive_run import Crowd, NeverAlone
from nouscoder.verifier.grading.time_limits import run_timed, stretched
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
async def test_what_counts(first: RunResult, second: RunResult | None, exit: Exit) -> None:
    results = [first] if second is None else [first, second]
    left = list(results)

    async def run() -> tuple[RunResult, str]:
        return left.pop(0), "ruling"

    result, ruling = await run_timed(run, LIMITS, Crowd())
    assert (result.exit, left) == (exit, [])
    assert ruling == (None if exit is Exit.TIME_LIMIT and results[-1].exit is Exit.EXITED else "ruling")
    assert result.stdout == results[-1].stdout


def test_the_sandbox_is_given_the_limit_and_the_borderline_above_it() -> None:
    assert (stretched(LIMITS).wall_time_s, stretched(LIMITS).memory_bytes) == (11.5, LIMITS.memory_bytes)


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_the_second_run_is_alone_on_the_machine_and_others_go_on_after_it() -> None:
    """The invariant of crowd.py."""
    crowd = Crowd()
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

    long = asyncio.ensure_future(run_timed(lambda: other("long"), LIMITS, crowd))
    await settled(lambda: "long" in running)
    border = asyncio.ensure_future(run_timed(borderline, LIMITS, crowd))
    await settled(lambda: len(seen) == 1)
    await asyncio.sleep(0.01)
    late = asyncio.ensure_future(run_timed(lambda: other("late"), LIMITS, crowd))
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


async def test_a_machine_that_is_never_free_leaves_the_time_out_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nouscoder.verifier.grading.time_limits.ALONE_PATIENCE_S", 0.02)
    crowd = Crowd()
    async with crowd.among_others():

        async def run() -> tuple[RunResult, None]:
            return took(10.5), None

        assert (await run_timed(run, LIMITS, crowd))[0].exit is Exit.TIME_LIMIT
        with pytest.raises(NeverAlone):
            async with crowd.alone(0.01):
                pass
    async with asyncio.timeout(1), crowd.alone(1):
        await asyncio.sleep(0)
    async with asyncio.timeout(1), crowd.among_others():
        await asyncio.sleep(0)


async def test_a_sandbox_that_falls_silent_in_the_second_run_is_not_the_candidates_fault() -> None:
    calls = 0

    async def run() -> tuple[RunResult, None]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise TimeoutError
        return took(10.5), None

    crowd = Crowd()
    with pytest.raises(TimeoutError):
        await run_timed(run, LIMITS, crowd)
    async with asyncio.timeout(1), crowd.among_others():
        await asyncio.sleep(0)


async def test_after_a_run_alone_others_have_the_machine_for_a_while() -> None:
    now_s = 100.0
    crowd = Crowd(clock=lambda: now_s)
    async with crowd.alone(1):
        now_s += 10.0
    assert crowd._rest_until_s == 110.0 + 40.0
    async with crowd.among_others():
        with pytest.raises(NeverAlone):
            async with crowd.alone(0.02):
                pass
        assert crowd._open.is_set(), "others are not held up while it rests"
    async with asyncio.timeout(1), crowd.alone(1):
        await asyncio.sleep(0)
