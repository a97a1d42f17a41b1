"""Lines of callers: announced work reaches those who wait, in order, with few looks, and none of it is lost."""

from __future__ import annotations

import asyncio

import pytest

from nouscoder.broker import wakeups
from nouscoder.broker.wakeups import AvailableWork, Found, Line, Waits


class Stock:
    """Pieces of work that a look takes one at a time, a moment after it began."""

    def __init__(self) -> None:
        self.left = 0
        self.num_looks = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def look(self) -> Found[int]:
        self.num_looks += 1
        await asyncio.sleep(0)
        taken = min(1, self.left)
        self.left -= taken
        await self.gate.wait()
        return Found(taken, taken > 0, self.left)

    def put(self, line: Line, amount: int = 1) -> None:
        self.left += amount
        line.wake()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("amounts", [[1] * 100, [100], [3, 0, 40, 57]])
async def test_each_piece_of_work_wakes_one_caller_and_costs_about_one_look(amounts: list[int]) -> None:
    line, stock = Line(), Stock()
    waiting = [asyncio.create_task(line.wait(f"w{n}", stock.look, 0, 60)) for n in range(200)]
    await settle()
    before = stock.num_looks
    for amount in amounts:
        stock.put(line, amount)
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while stock.left or sum(task.done() for task in waiting) < 100:
            await asyncio.sleep(0)
    await settle()
    assert [task.done() for task in waiting] == [True] * 100 + [False] * 100, "first come, first served"
    assert stock.num_looks - before <= 100 + len(amounts) + 1
    line.dismiss()
    assert sum(await asyncio.gather(*waiting)) == 100
    assert len(line) == 0


async def test_work_that_comes_while_a_caller_looks_is_not_missed() -> None:
    line, stock = Line(), Stock()
    stock.gate.clear()
    waiting = asyncio.create_task(line.wait("w", stock.look, 0, 60))
    await settle()
    stock.put(line)  # its look found nothing, and has not answered yet
    stock.gate.set()
    assert await asyncio.wait_for(waiting, 60) == 1


async def test_what_is_leased_for_a_caller_whose_time_is_over_reaches_it() -> None:
    line, stock = Line(), Stock()
    waiting = asyncio.create_task(line.wait("w", stock.look, 0, 0.05))
    await settle()
    stock.gate.clear()
    stock.put(line)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    stock.gate.set()
    assert await asyncio.wait_for(waiting, 60) == 1


async def test_a_caller_that_is_gone_leaves_its_place_and_the_next_is_served() -> None:
    line, stock = Line(), Stock()
    first, second = (asyncio.create_task(line.wait(f"w{n}", stock.look, 0, 60)) for n in range(2))
    await settle()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    stock.put(line)
    assert await asyncio.wait_for(second, 60) == 1
    assert len(line) == 0


async def test_a_look_that_fails_tells_one_caller_and_the_others_wait_on() -> None:
    line, stock = Line(), Stock()
    waiting = [asyncio.create_task(line.wait(f"w{n}", stock.look, 0, 60)) for n in range(2)]
    await settle()

    async def fail() -> Found[int]:
        raise OSError("away")

    failing = asyncio.create_task(line.wait("other", fail, 0, 60))
    with pytest.raises(OSError, match="away"):
        await failing
    stock.put(line, 2)
    assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [1, 1]


async def test_those_who_are_dismissed_answer_at_once_and_the_line_stays_closed() -> None:
    line, stock = Line(), Stock()
    waiting = [asyncio.create_task(line.wait(f"w{n}", stock.look, 0, 60)) for n in range(3)]
    await settle()
    line.dismiss()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [0, 0, 0]


async def test_work_of_another_broker_reaches_a_caller_with_a_slow_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker asked Redis while the first look of this caller was still on its way, and nobody stood in line."""
    monkeypatch.setattr(wakeups, "LOOK_AGAIN_S", 0.01)
    stock = Stock()
    stock.gate.clear()

    async def available() -> AvailableWork:
        return AvailableWork(0, stock.left, 0, "")

    waits = Waits(available)
    waiting = asyncio.create_task(waits.until(waits.grading, "w", stock.look, 0, 30))
    await asyncio.sleep(0.1)
    stock.gate.set()
    await settle()  # its own look found nothing
    stock.left += 1  # through another broker: nobody wakes this line
    assert await waiting == 1
    waits.end()
