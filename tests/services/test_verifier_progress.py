"""The bookkeeping of one submission and of many: a test is recorded once, and only so many are in hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from nouscoder.submission import StdinCase, StdinTests, Submission
from nouscoder.verdict import VerdictKind
from nouscoder.verifier.progress import Progress
from nouscoder.verifier.sandbox.fake import ended
from nouscoder.verifier.streams import spread


async def test_a_test_is_recorded_once_and_nothing_is_asked_for_after_the_last() -> None:
    tests = StdinTests((StdinCase("a", "x"), StdinCase("bb", "x")))
    progress = Progress(Submission(tests, "code"), "fake", 0.0)
    assert (progress.next_test(), progress.next_test()) == (1, 1)
    await progress.record(1, ended(b"x"))
    with pytest.raises(ValueError, match="not the one"):
        await progress.record(1, ended(b"x"))
    await progress.record(0, ended(b"x"))
    assert progress.next_test() is None
    assert progress.verdict().kind is VerdictKind.ACCEPTED
    with pytest.raises(ValueError, match="not the one"):
        await progress.record(0, ended(b"x"))


async def test_a_large_output_is_judged_as_a_small_one() -> None:
    wanted = "7 " * 1_000_000
    progress = Progress(Submission(StdinTests((StdinCase("", wanted),)), "code"), "fake", 0.0)
    assert (await progress.record(0, ended(wanted.encode()))).outcome is VerdictKind.ACCEPTED


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def test_spreading_keeps_its_bound_and_answers_each_item_once() -> None:
    in_hand = most = 0

    async def work(number: int) -> int:
        nonlocal in_hand, most
        in_hand += 1
        most = max(most, in_hand)
        await asyncio.sleep(0.001 * (number % 3))
        in_hand -= 1
        return number

    assert sorted([one async for one in spread(numbers(50), work, 4)]) == list(range(50))
    assert (most, in_hand) == (4, 0)


async def test_a_reader_that_goes_away_cancels_the_work_behind() -> None:
    cancelled = begun = 0
    all_begun = asyncio.Event()

    async def work(number: int) -> int:
        nonlocal cancelled, begun
        begun += 1
        if begun == 4:
            all_begun.set()
        try:
            await asyncio.wait_for(all_begun.wait(), 5)
            await asyncio.sleep(60 if number else 0)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return number

    answers = spread(numbers(4), work, 4)
    assert await anext(answers) == 0
    await answers.aclose()  # type: ignore[attr-defined]
    assert cancelled == 3


async def test_what_the_source_raises_comes_after_the_answers() -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise RuntimeError("source")

    async def work(number: int) -> int:
        return number

    seen = []

    async def read() -> None:
        async for one in spread(broken(), work, 2):
            seen.append(one)

    with pytest.raises(RuntimeError, match="source"):
        await read()
    assert seen == [1]
