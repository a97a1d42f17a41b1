"""The tests of one submission on several slots: other submissions are not delayed, and the verdict is the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from nouscoder.config import VerifierSection
from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import TestOutcome, Verdict, VerdictKind
from nouscoder.http_server.fair_queue import FairSlots
from nouscoder.verifier.grading.case_workers import WorkerGroup
from nouscoder.verifier.grading.grader import Grader, GradingPolicy
from nouscoder.verifier.grading.progress import SubmissionProgress, hardest_first
from nouscoder.verifier.grading.runs import judge_for
from nouscoder.verifier.judges.rulings import Ruling
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import (
    NO_FILES,
    CompileFailed,
    Dialogue,
    Program,
    RunResult,
    Sandbox,
    SandboxError,
    Session,
)
from nouscoder.verifier.sandbox.fake import ended


def submission_of(passes: list[bool], **fields: object) -> Submission:
    """A submission whose tests run in the order of their indices; every program answers `yes`."""
    cases = tuple(StdinCase(f"{index:03d}", "yes" if passed else "no") for index, passed in enumerate(passes))
    return Submission(StdinTests(cases), "code", **fields)  # type: ignore[arg-type]


async def settled(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


class ScriptedWork:
    """Each test waits for its gate, takes 1 s by the scripted clock and answers `yes`; opening takes `open_s`."""

    def __init__(self, num_tests: int, open_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.open_s = open_s
        self.gates = [asyncio.Event() for _ in range(num_tests)]
        self.troubles: dict[int, Exception] = {}  # raised by the first run of a test
        self.open_trouble: Exception | None = None  # raised by every opening but the first
        self.running: list[int] = []
        self.runs: list[int] = []
        self.num_open = self.num_opened = self.num_extra = 0
        self.outcomes: list[int] = []
        self.broken: list[Exception] = []

    def clock(self) -> float:
        return self.now_s

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ScriptedWork]:
        self.now_s += self.open_s
        self.num_opened += 1
        if self.num_opened > 1 and self.open_trouble is not None:
            raise self.open_trouble
        self.num_open += 1
        try:
            yield self
        finally:
            self.num_open -= 1

    async def run(self, runs: object, index: int) -> tuple[RunResult, Ruling | None, float]:
        self.running.append(index)
        self.runs.append(index)
        try:
            await self.gates[index].wait()
            if index in self.troubles:
                raise self.troubles.pop(index)
        finally:
            self.running.remove(index)
        self.now_s += 1.0
        return ended(b"yes"), None, 1.0

    def let_go(self, *indices: int) -> None:
        for index in indices or range(len(self.gates)):
            self.gates[index].set()

    def report(self, outcome: TestOutcome) -> None:
        self.outcomes.append(outcome.index)

    def worker_opened(self) -> None:
        self.num_extra += 1

    def worker_failed(self, error: Exception) -> None:
        self.broken.append(error)


class Rig:
    """One submission that holds its slot, with its test workers."""

    def __init__(self, passes: list[bool], num_slots: int = 3, most: int = 3, open_s: float = 0.0) -> None:
        submission = submission_of(passes)
        judge = judge_for(submission)
        self.progress = SubmissionProgress(submission, judge, hardest_first([0] * len(passes)), "scripted", 0.0)
        self.slots = FairSlots(num_slots, 8, lambda waiting, busy: None)
        self.work = ScriptedWork(len(passes), open_s)
        self.workers = WorkerGroup(self.progress, self.slots, self.work, most, 0.5, self.work.clock)  # type: ignore[arg-type]

    async def grade(self) -> Verdict:
        async with self.slots.slot("c"):
            await self.workers.run()
        return self.progress.verdict()

    async def to_three_workers(self) -> asyncio.Task[Verdict]:
        """Start grading until test 0 has ended and tests 1, 2 and 3 run."""
        task = asyncio.create_task(self.grade())
        self.work.let_go(0)
        await settled(lambda: self.work.running == [1, 2, 3])
        return task

    @property
    def nothing_is_left(self) -> bool:
        slots = (self.slots.busy, self.slots.extra, self.slots.waiting)
        return not any((*slots, self.work.num_open, self.work.running)) and len(asyncio.all_tasks()) == 1


async def test_idle_slots_take_tests_of_a_submission_once_its_first_has_ended() -> None:
    rig = Rig([True] * 9)
    task = asyncio.create_task(rig.grade())
    await settled(lambda: rig.work.running == [0])
    await asyncio.sleep(0.01)
    assert rig.work.running == [0], "the cost of a test is unknown before the first one ends"
    rig.work.let_go(0)
    await settled(lambda: rig.work.running == [1, 2, 3])
    assert (rig.slots.busy, rig.slots.extra, rig.work.num_extra) == (3, 2, 2)
    rig.work.let_go()
    verdict = await task
    assert (verdict.kind, verdict.graded) == (VerdictKind.ACCEPTED, 9)
    assert rig.work.outcomes == list(range(9)), "reported in order"
    assert sorted(rig.work.runs) == list(range(9)), "each must run once"
    assert rig.nothing_is_left


@pytest.mark.parametrize(
    ("rig_of", "why"),
    [
        (lambda: Rig([True] * 9, num_slots=1), "no slot is idle"),
        (lambda: Rig([True] * 9, most=1), "this type of tests allows one worker"),
        (lambda: Rig([True] * 9, open_s=4.0), "7 s of tests are less than three times what opening costs"),
        (lambda: Rig([True]), "there is one test"),
    ],
)
async def test_no_worker_is_added(rig_of: Callable[[], Rig], why: str) -> None:
    rig = rig_of()
    rig.work.let_go()
    assert (await rig.grade()).kind is VerdictKind.ACCEPTED
    assert (rig.work.num_opened, rig.work.num_extra) == (1, 0), why


async def test_an_expensive_opening_pays_while_enough_tests_are_left() -> None:
    rig = Rig([True] * 10, open_s=2.5)
    rig.work.let_go()
    await rig.grade()
    assert rig.work.num_extra == 1, "8 s are left after the first test for one worker, but 4 s each for two"


async def test_a_waiting_submission_gets_the_slot_of_an_extra_worker_before_its_next_test() -> None:
    rig = Rig([True] * 9)
    task = await rig.to_three_workers()
    served: list[str] = []
    leave = asyncio.Event()

    async def other(name: str) -> None:
        async with rig.slots.slot(name):
            served.append(name)
            await leave.wait()

    others = [asyncio.create_task(other(name)) for name in "abc"]
    await settled(lambda: rig.slots.waiting == 3)
    rig.work.let_go(1)
    await settled(lambda: served == ["a"])
    assert (rig.work.running, rig.slots.busy) == ([2, 3], 3)
    rig.work.let_go(3)
    await settled(lambda: served == ["a", "b"])
    assert (rig.work.running, rig.slots.extra) == ([2], 0)
    rig.work.let_go(2)
    await settled(lambda: rig.work.running == [4])
    assert (served, rig.slots.waiting) == (["a", "b"], 1), "the last worker keeps its slot"
    leave.set()
    rig.work.let_go()
    assert (await task).kind is VerdictKind.ACCEPTED
    await asyncio.gather(*others)
    assert rig.nothing_is_left


async def test_a_failed_worker_loses_only_its_current_test() -> None:
    rig = Rig([True] * 9)
    task = await rig.to_three_workers()
    rig.work.troubles = {1: SandboxError("gone")}
    rig.work.let_go(1)
    await settled(lambda: rig.slots.busy == 2)
    assert (rig.work.running, rig.work.outcomes, [str(one) for one in rig.work.broken]) == ([2, 3], [0], ["gone"])
    rig.work.let_go()
    verdict = await task
    assert (verdict.kind, verdict.graded, rig.work.num_extra) == (VerdictKind.ACCEPTED, 9, 2)
    assert sorted(rig.work.runs) == sorted([1, *range(9)])
    assert rig.nothing_is_left


@pytest.mark.parametrize("trouble", [SandboxError("none to be had"), CompileFailed("it did before"), TimeoutError()])
async def test_grading_continues_when_an_extra_worker_cannot_open_its_sandbox(trouble: Exception) -> None:
    rig = Rig([True] * 4, num_slots=2)
    rig.work.open_trouble = trouble
    task = asyncio.create_task(rig.grade())
    rig.work.let_go(0)
    await settled(lambda: len(rig.work.broken) == 1 and rig.slots.extra == 0)
    assert rig.work.running == [1]
    rig.work.let_go()
    assert (await task).kind is VerdictKind.ACCEPTED
    assert (rig.work.num_opened, len(rig.work.broken)) == (2, 1)
    assert not isinstance(rig.work.broken[0], CompileFailed), "the first sandbox has compiled it"
    assert rig.nothing_is_left


async def test_the_failure_of_the_last_worker_is_raised_and_its_tests_can_be_taken_again() -> None:
    rig = Rig([True] * 9, num_slots=2)
    task = asyncio.create_task(rig.grade())
    rig.work.let_go(0)
    await settled(lambda: rig.work.running == [1, 2])
    rig.work.troubles = {1: SandboxError("one"), 2: SandboxError("two")}
    rig.work.let_go(1)
    await settled(lambda: rig.work.running == [2])
    rig.work.let_go(2)
    with pytest.raises(SandboxError, match="two"):
        await task
    assert (rig.progress.num_left, rig.progress.take(), rig.progress.is_known) == (8, 1, False)
    assert rig.nothing_is_left


async def test_a_compile_failure_in_the_first_worker_is_raised() -> None:
    rig = Rig([True])
    rig.work.num_opened, rig.work.open_trouble = 1, CompileFailed("line 1")
    with pytest.raises(CompileFailed):
        await rig.grade()


async def test_after_a_failure_earlier_tests_are_awaited_and_later_ones_abandoned_at_once() -> None:
    rig = Rig([True, True, False, False, True, True])
    task = await rig.to_three_workers()
    rig.work.let_go(2)
    await settled(lambda: rig.slots.busy == 1)
    assert (rig.work.running, rig.work.num_open, rig.work.outcomes) == ([1], 1, [0])
    rig.work.let_go(1)
    verdict = await task
    assert (verdict.kind, verdict.passed, verdict.graded) == (VerdictKind.WRONG_ANSWER, 2, 3)
    assert verdict.first_failure is not None
    assert (verdict.first_failure.index, rig.work.outcomes) == (2, [0, 1, 2])
    assert rig.nothing_is_left


async def test_the_first_worker_can_be_abandoned_too() -> None:
    rig = Rig([True, True, False, True, True, True])
    task = await rig.to_three_workers()
    rig.work.let_go(1)
    await settled(lambda: rig.work.running == [2, 3, 4])
    rig.work.let_go(2)
    verdict = await task
    assert (verdict.graded, rig.work.outcomes) == (3, [0, 1, 2])
    assert rig.nothing_is_left


async def test_cancelling_ends_every_worker_even_before_its_first_step() -> None:
    for rounds in range(30):
        rig = Rig([True] * 9)
        task = asyncio.create_task(rig.grade())
        rig.work.let_go(0)
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rig.nothing_is_left, rounds


class ChancySandbox(Sandbox):
    """Programs that answer `yes` after a random delay; one random run or opening fails."""

    name = "chancy"
    isolation: tuple[str, ...] = ()

    def __init__(self, num_slots: int, chance: random.Random) -> None:
        self.num_slots = num_slots
        self.open = self.most_open = 0
        self._chance = chance
        self._calls_to_failure = chance.randrange(60)

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def _moment(self) -> None:
        for _ in range(self._chance.randrange(6)):
            await asyncio.sleep(0)
        self._calls_to_failure -= 1
        if self._calls_to_failure == 0:
            raise SandboxError("by chance")

    @asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[Session]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._moment()
            yield self
        finally:
            self.open -= 1

    def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AbstractAsyncContextManager[tuple[Session, ...]]:
        raise NotImplementedError

    def dialogue(self, program: Program) -> AbstractAsyncContextManager[Dialogue]:
        """Not used by these tests."""
        raise NotImplementedError

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        await self._moment()
        return replace(ended(b"yes"), wall_time_s=float(int(stdin) % 5))

    async def dialogue_with(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        raise NotImplementedError

    async def announce(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> None:
        """Nothing is done ahead."""


def grader_of(sandbox: ChancySandbox) -> Grader:
    """Extra workers wherever there is room."""
    section, policy = VerifierSection(max_submission_s=20.0), GradingPolicy(min_worker_left_s=0.0)
    return Grader(sandbox, VerifierMetrics(CollectorRegistry()), section, policy=policy)


def without_duration(verdict: Verdict) -> Verdict:
    """The verdict without its measured duration."""
    return replace(verdict, duration_s=0.0)


async def grade_concurrently(submissions: list[Submission], num_slots: int, seed: int) -> list[Verdict]:
    """Grade all of them, started at random moments; some are followed by a client that disconnects."""
    chance = random.Random(seed)
    sandbox = ChancySandbox(num_slots, chance)
    grader = grader_of(sandbox)
    reported: list[list[TestOutcome]] = [[] for _ in submissions]
    tasks, gone = [], []
    for submission, outcomes in zip(submissions, reported, strict=True):
        tasks.append(asyncio.create_task(grader.grade(submission, outcomes.append)))
        if chance.random() < 0.3:
            gone.append(asyncio.create_task(grader.grade(submission)))
        for _ in range(chance.randrange(40)):
            await asyncio.sleep(0)
        if gone and chance.random() < 0.5:
            gone[-1].cancel()
    verdicts = await asyncio.gather(*tasks)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    for verdict, outcomes in zip(verdicts, reported, strict=True):
        assert tuple(sorted(outcomes, key=lambda one: one.index)) == verdict.tests
    assert (sandbox.open, grader.unfinished, grader._slots.extra) == (0, 0, 0)
    assert sandbox.most_open <= num_slots
    assert len(asyncio.all_tasks()) == 1
    return verdicts


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from([True] * 5 + [False]), min_size=1, max_size=14), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.integers(2, 5),
    st.integers(0, 2**32),
)
def test_verdicts_do_not_depend_on_the_number_of_slots_or_the_traffic(
    asked: list[tuple[list[bool], bool]], num_slots: int, seed: int
) -> None:
    """The invariants of case_workers.py and grader.py: verdicts equal the sequential ones, and nothing is left."""
    submissions = [submission_of(passes, stop_on_first_failure=stops) for passes, stops in asked]
    spread_out = asyncio.run(grade_concurrently(submissions, num_slots, seed))
    one_by_one = [asyncio.run(grade_concurrently([submission], 1, 0))[0] for submission in submissions]
    assert [without_duration(verdict) for verdict in spread_out] == [
        without_duration(verdict) for verdict in one_by_one
    ]
