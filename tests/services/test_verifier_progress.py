"""The progress of one submission equals a sequential run, and concurrency over many items is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.api.streaming import map_concurrently
from nouscoder.verifier.grading.progress import SubmissionProgress, hardest_first
from nouscoder.verifier.grading.runs import judge_for
from nouscoder.verifier.judges.comparators import SMALL_BYTES
from nouscoder.verifier.judges.rulings import Ruling
from nouscoder.verifier.sandbox.fake import ended


def progress_of(submission: Submission, max_spent_s: float = float("inf")) -> SubmissionProgress:
    """The progress of a new submission, with the longest input first."""
    judge = judge_for(submission)
    order = hardest_first([judge.input_size(index) for index in range(judge.num_tests)])
    return SubmissionProgress(submission, judge, order, "fake", 0.0, max_spent_s)


async def test_a_test_is_taken_by_one_worker_recorded_once_and_available_again_when_given_back() -> None:
    progress = progress_of(Submission(StdinTests((StdinCase("a", "x"), StdinCase("bb", "x"))), "code"))
    assert (progress.take(), progress.num_left, progress.take(), progress.take()) == (1, 1, 0, None)
    progress.give_back(1)
    with pytest.raises(ValueError, match="has not been taken"):
        await progress.record(1, ended(b"x"))
    assert (progress.num_left, progress.take()) == (1, 1)
    assert await progress.record(0, ended(b"x")) == []
    assert [one.index for one in await progress.record(1, ended(b"x"))] == [1, 0]
    with pytest.raises(ValueError, match="has not been taken"):
        progress.give_back(1)
    assert (progress.is_known, progress.take(), progress.verdict().kind) == (True, None, VerdictKind.ACCEPTED)


async def test_failures_after_the_one_that_ends_grading_do_not_count() -> None:
    progress = progress_of(Submission(StdinTests((StdinCase("", "no"),) * 4), "code"))
    assert [progress.take() for _ in range(3)] == [0, 1, 2]
    assert await progress.record(1, ended(b"yes")) == []
    assert (progress.counts(0), progress.counts(2), progress.num_left) == (True, False, 0)
    assert not await progress.record(2, ended(b"yes"))
    assert [one.index for one in await progress.record(0, ended(b"yes"))] == [0]
    assert (progress.is_known, progress.verdict().graded) == (True, 1)


async def test_only_small_outputs_are_compared_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def outcome_of(*_: object) -> VerdictKind:
        threads.append(threading.current_thread())
        return VerdictKind.ACCEPTED

    monkeypatch.setattr("nouscoder.verifier.grading.progress.outcome_of", outcome_of)
    progress = progress_of(Submission(StdinTests((StdinCase("", "yes"),) * 4), "code"))
    small, large = b"x" * SMALL_BYTES, b"x" * (SMALL_BYTES + 1)
    for result in (ended(small), ended(large), ended(b"", result=small), ended(b"", result=large)):
        index = progress.take()
        assert index is not None
        await progress.record(index, result)
    loop = threading.current_thread()
    assert [thread is loop for thread in threads] == [True, False, True, False]


async def test_the_total_time_counts_only_while_a_test_is_left() -> None:
    for number, kind in ((2, VerdictKind.ACCEPTED), (3, VerdictKind.TIME_LIMIT_EXCEEDED)):
        cases = (StdinCase("", "yes"),) * number
        progress = progress_of(Submission(StdinTests(cases), "code"), max_spent_s=5.0)
        while (index := progress.take()) is not None:
            await progress.record(index, replace(ended(b"yes"), wall_time_s=4.0))
        assert (progress.verdict().kind, progress.verdict().graded) == (kind, 2)


async def test_the_time_of_checkers_counts_and_one_at_fault_is_still_at_fault() -> None:
    fault = Ruling(VerdictKind.INTERNAL_ERROR, "the checker failed")
    for ruling, kind in ((None, VerdictKind.TIME_LIMIT_EXCEEDED), (fault, VerdictKind.INTERNAL_ERROR)):
        submission = Submission(StdinTests((StdinCase("", "yes"),) * 3), "code", stop_on_first_failure=False)
        progress = progress_of(submission, max_spent_s=5.0)
        while (index := progress.take()) is not None:
            await progress.record(index, replace(ended(b"yes"), wall_time_s=1.0), ruling, spent_s=4.0)
        assert (progress.verdict().kind, progress.verdict().graded) == (kind, 2)


@dataclass(frozen=True)
class Case:
    """A submission whose test `index` passes if `passes[index]`, takes `seconds[index]` and has that input length."""

    passes: Sequence[bool]
    seconds: Sequence[int]
    lengths: Sequence[int]
    stops: bool
    max_spent_s: float

    def submission(self) -> Submission:
        """The submission. Its program answers `yes` to every test."""
        answers = ["yes" if passed else "no" for passed in self.passes]
        cases = tuple(StdinCase("i" * length, answer) for length, answer in zip(self.lengths, answers, strict=True))
        return Submission(StdinTests(cases), "code", stop_on_first_failure=self.stops)


@st.composite
def some_case(draw: st.DrawFn) -> Case:
    number = draw(st.integers(1, 12))
    many = {"min_size": number, "max_size": number}
    return Case(
        passes=draw(st.lists(st.sampled_from([True, True, False]), **many)),  # type: ignore[arg-type]
        seconds=draw(st.lists(st.sampled_from([0, 1, 4]), **many)),  # type: ignore[arg-type]
        lengths=draw(st.lists(st.integers(0, 3), **many)),  # type: ignore[arg-type]
        stops=draw(st.booleans()),
        max_spent_s=draw(st.sampled_from([5.0, 20.0, float("inf")])),
    )


def one_after_the_other(case: Case) -> tuple[VerdictKind, list[int], int | None]:
    """The reference: (verdict, tests in order, first failure) of a sequential run."""
    reported: list[int] = []
    failures: list[int] = []
    for index in hardest_first(case.lengths):
        if sum(case.seconds[one] for one in reported) > case.max_spent_s:
            return VerdictKind.TIME_LIMIT_EXCEEDED, reported, min(failures, default=None)
        reported.append(index)
        if not case.passes[index]:
            failures.append(index)
            if case.stops:
                break
    return (VerdictKind.WRONG_ANSWER if failures else VerdictKind.ACCEPTED), reported, min(failures, default=None)


async def run_by_many(case: Case, num_hands: int, chance: random.Random) -> tuple[Verdict, list[TestOutcome]]:
    """Run with up to `num_hands` tests taken at once. `chance` decides which ends next and which is given back."""
    progress = progress_of(case.submission(), case.max_spent_s)
    hands: list[int] = []
    reported: list[TestOutcome] = []
    num_given_back = 0
    while not progress.is_known:
        while len(hands) < num_hands and chance.random() < 0.7 and (index := progress.take()) is not None:
            assert index not in hands
            hands.append(index)
        if not hands:
            continue
        index = hands.pop(chance.randrange(len(hands)))
        if chance.random() < 0.2 and num_given_back < 20:
            num_given_back += 1
            progress.give_back(index)
            continue
        mattered = progress.counts(index)
        certain = await progress.record(index, replace(ended(b"yes"), wall_time_s=float(case.seconds[index])))
        assert mattered or not certain
        reported.extend(certain)
    assert not any(map(progress.counts, hands))
    assert (progress.take(), progress.num_left) == (None, 0)
    return progress.verdict(), reported


@settings(max_examples=200)
@given(some_case(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_verdict_does_not_depend_on_the_order_in_which_tests_end(
    case: Case, num_hands: int, chance: random.Random
) -> None:
    """The invariant of progress.py."""
    verdict, reported = asyncio.run(run_by_many(case, num_hands, chance))
    kind, indices, failure = one_after_the_other(case)
    assert [one.index for one in reported] == indices
    assert [one.index for one in verdict.tests] == sorted(indices)
    assert (verdict.kind, verdict.graded, verdict.total) == (kind, len(indices), len(case.passes))
    assert verdict.passed == sum(case.passes[index] for index in indices)
    assert (verdict.first_failure.index if verdict.first_failure else None) == failure


async def test_a_large_output_is_judged_like_a_small_one() -> None:
    wanted = "7 " * 1_000_000
    progress = progress_of(Submission(StdinTests((StdinCase("", wanted),)), "code"))
    assert progress.take() == 0
    (outcome,) = await progress.record(0, ended(wanted.encode()))
    assert outcome.outcome is VerdictKind.ACCEPTED


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def test_bounded_concurrency_answers_each_item_once() -> None:
    in_hand = most = 0

    async def work(number: int) -> int:
        nonlocal in_hand, most
        in_hand += 1
        most = max(most, in_hand)
        await asyncio.sleep(0.001 * (number % 3))
        in_hand -= 1
        return number

    assert sorted([one async for one in map_concurrently(numbers(50), work, 4)]) == list(range(50))
    assert (most, in_hand) == (4, 0)


async def test_a_reader_that_disconnects_cancels_the_work() -> None:
    cancelled = begun = 0
    all_begun = asyncio.Event()

    async def work(number: int) -> int:
        nonlocal cancelled, begun
        begun += 1
        if begun == 4:
            all_begun.set()
        try:
            await asyncio.wait_for(all_begun.wait(), 60)
            await asyncio.sleep(60 if number else 0)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return number

    answers = map_concurrently(numbers(4), work, 4)
    assert await anext(answers) == 0
    await answers.aclose()  # type: ignore[attr-defined]
    assert cancelled == 3


async def test_an_exception_of_the_source_comes_after_the_answers() -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise RuntimeError("source")

    async def work(number: int) -> int:
        return number

    seen = []

    async def read() -> None:
        async for one in map_concurrently(broken(), work, 2):
            seen.append(one)

    with pytest.raises(RuntimeError, match="source"):
        await read()
    assert seen == [1]


class Item:
    """Can be referred to weakly."""


@pytest.mark.parametrize("fails_in", ["source", "work"])
async def test_a_failure_keeps_no_item_until_a_garbage_collection(fails_in: str) -> None:
    items: list[weakref.ref[Item]] = []

    def made() -> Item:
        item = Item()
        items.append(weakref.ref(item))
        return item

    async def source() -> AsyncIterator[Item]:
        while True:
            yield made()
            if fails_in == "source" and len(items) == 3:
                raise RuntimeError

    async def work(item: Item) -> int:
        if fails_in == "work" and len(items) == 3:
            raise RuntimeError
        return 1

    async def read() -> None:
        async for _ in map_concurrently(source(), work, 2):
            pass

    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            await read()
        await asyncio.sleep(0)  # callbacks of what was cancelled are still to be called
        assert [one() for one in items if one() is not None] == []
    finally:
        gc.enable()
