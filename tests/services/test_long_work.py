"""Tests the invariant of judge.in_turn."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from nouscoder.verifier.judges.judge import in_turn


async def test_at_most_one_work_is_in_progress_and_the_event_loop_goes_on() -> None:
    inside, most, released = 0, 0, threading.Event()

    def work(number: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        released.wait(30)
        inside -= 1
        return number

    works = [asyncio.ensure_future(in_turn(work, number)) for number in range(10)]
    while not inside:
        await asyncio.sleep(0)  # this loop turns while the work waits
    released.set()
    assert await asyncio.gather(*works) == list(range(10))
    assert most == 1


async def test_what_the_work_raises_reaches_its_caller_only() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_turn(divmod, 1, 0)
    assert await in_turn(divmod, 7, 2) == (3, 1)


async def test_the_garbage_collector_is_off_meanwhile() -> None:
    assert gc.isenabled()
    assert not await in_turn(gc.isenabled)
    with pytest.raises(ZeroDivisionError):
        await in_turn(divmod, 1, 0)
    assert gc.isenabled()
