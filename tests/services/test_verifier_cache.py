"""Identical submissions are graded once and merged while in progress; only lasting verdicts are cached."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from prometheus_client import CollectorRegistry

from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.access.caller import Caller, set_caller
from nouscoder.verifier.grading.grader import OnOutcome
from nouscoder.verifier.grading.verdict_cache import CachedGrader
from nouscoder.verifier.observe.metrics import VerifierMetrics

TESTED = TestOutcome(0, VerdictKind.ACCEPTED, 0.1, 0.1, 1)


class CountingGrader:
    """Gives the verdict that the code names once `gate` is open, and records the graded submissions."""

    backend = "counting"
    num_slots = 1
    unfinished = 0

    def __init__(self) -> None:
        self.graded: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        text = submission.code or submission.completion or ""
        self.graded.append(text)
        await self.gate.wait()
        if on_outcome:
            on_outcome(TESTED)
        kind = VerdictKind(text.split("*")[0].split("#")[0])
        num_tests = int(text.partition("*")[2] or 1)
        return Verdict(kind, 1, 1, 1, 0.5, "counting", tests=(TESTED,) * num_tests)


def submission(code: str = "accepted", wanted: str = "a") -> Submission:
    """One test."""
    return Submission(StdinTests((StdinCase("a", wanted),)), code)


def cached(inner: CountingGrader, num_entries: int = 10, registry: CollectorRegistry | None = None) -> CachedGrader:
    """`inner` behind a cache."""
    return CachedGrader(inner, VerifierMetrics(registry or CollectorRegistry()), num_entries)


async def test_the_same_submission_is_graded_once_and_then_cached() -> None:
    inner, registry = CountingGrader(), CollectorRegistry()
    grader = cached(inner, registry=registry)
    first, second = await grader.grade(submission()), await grader.grade(submission())
    assert (first.cached, second.cached, len(inner.graded)) == (False, True, 1)
    assert second.kind is first.kind
    assert second.duration_s < first.duration_s
    assert registry.get_sample_value("nouscoder_verifier_cache_hits_total") == 1


async def test_a_submission_that_differs_is_graded() -> None:
    inner = CountingGrader()
    grader = cached(inner)
    await grader.grade(submission())
    await grader.grade(submission(wanted="b"))
    await grader.grade(submission("accepted#"))
    assert len(inner.graded) == 3


async def test_a_client_gets_no_verdict_of_another() -> None:
    inner = CountingGrader()
    grader = cached(inner)
    for client in ("one", "two", "one"):
        set_caller(Caller(client))
        verdict = await grader.grade(submission())
    assert (verdict.cached, len(inner.graded)) == (True, 2)


async def test_internal_errors_and_timeouts_are_not_cached() -> None:
    inner = CountingGrader()
    grader = cached(inner)
    for kind in ("internal_error", "time_limit_exceeded"):
        for _ in range(2):
            assert not (await grader.grade(submission(kind))).cached
    assert len(inner.graded) == 4


async def test_equal_submissions_in_progress_are_merged_and_each_gets_its_outcomes() -> None:
    inner = CountingGrader()
    inner.gate.clear()
    grader = cached(inner)
    heard: list[TestOutcome] = []
    tasks = [asyncio.ensure_future(grader.grade(submission("time_limit_exceeded"), heard.append)) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert (len(inner.graded), grader.unfinished) == (1, 4)
    inner.gate.set()
    assert [one.cached for one in await asyncio.gather(*tasks)] == [False, True, True, True, True]
    assert (len(inner.graded), len(heard), grader.unfinished) == (1, 5, 0)


async def test_a_leader_that_is_cancelled_or_fails_leaves_the_work_to_a_follower() -> None:
    inner = CountingGrader()
    inner.gate.clear()
    grader = cached(inner)
    tasks = [asyncio.ensure_future(grader.grade(submission())) for _ in range(3)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    tasks[1].cancel()
    inner.gate.set()
    assert (await tasks[2]).kind is VerdictKind.ACCEPTED
    assert len(inner.graded) == 2
    both = await asyncio.gather(*(grader.grade(submission("internal_error")) for _ in range(2)))
    assert [one.cached for one in both] == [False, False]


async def test_the_least_recently_used_verdict_is_evicted_first() -> None:
    inner = CountingGrader()
    grader = cached(inner, num_entries=2)
    for code in ("accepted#1", "accepted#2", "accepted#1", "accepted#3", "accepted#1", "accepted#2"):
        await grader.grade(submission(code))
    assert inner.graded == ["accepted#1", "accepted#2", "accepted#3", "accepted#2"]


async def test_a_large_verdict_counts_as_several_entries_and_a_too_large_one_is_not_cached() -> None:
    """An entry has 48 KiB: 600 outcomes take three of four entries, 1,000 take five."""
    inner = CountingGrader()
    grader = cached(inner, num_entries=4)
    for code in ("accepted#1", "accepted#2", "accepted*600", "accepted#2", "accepted*600", "accepted#1"):
        await grader.grade(submission(code))
    assert inner.graded == ["accepted#1", "accepted#2", "accepted*600", "accepted#1"]
    for _ in range(2):
        await grader.grade(submission("accepted*1000"))
    assert inner.graded[4:] == ["accepted*1000"] * 2


async def test_every_text_is_part_of_the_key_and_none_is_formatted() -> None:
    inner = CountingGrader()
    grader = cached(inner)

    class Text(str):
        """repr() of a long text of odd characters takes a second."""

        __slots__ = ()

        def __repr__(self) -> str:
            raise AssertionError("formatted")

    plain = submission(Text("accepted#\ud800"))
    differing = (
        plain,
        replace(plain, language=Text("c")),
        replace(plain, problem_id=Text("p")),
        replace(plain, files={Text("helper.py"): Text("x = 1")}),
        replace(plain, files={Text("helper.py"): Text("x = 2")}),
        replace(plain, code=None, completion=Text("accepted#\ud800")),
    )
    for one in (*differing, *differing):
        await grader.grade(one)
    assert len(inner.graded) == len(differing)


async def test_a_submission_without_problem_id_gets_no_verdict_from_a_learned_order() -> None:
    inner = CountingGrader()
    grader = cached(inner)
    plain = submission()
    for one in (plain, replace(plain, problem_id="p"), replace(plain, problem_id="p")):
        await grader.grade(one)
    assert len(inner.graded) == 2
    for problem_id in ("", "p", "q"):
        await grader.grade(replace(plain, problem_id=problem_id, stop_on_first_failure=False))
    assert len(inner.graded) == 3, "the order must not matter when every test runs"
