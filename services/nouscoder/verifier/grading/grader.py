"""Grading: takes a submission and returns its verdict.

extract code -> wait for a slot -> fresh sandbox -> tests, hardest first -> outcome of each -> verdict.

INVARIANT: a submission that `grade` accepts gets exactly one verdict, unless its caller is cancelled or the queue
refuses it. At most `num_slots` sandboxes are in use, and a submission holds more than one only while no other
waits (case_workers.py). At most `max_queue` submissions wait. A slot is free again as soon as the verdict is known, the
caller is cancelled or the sandbox has failed.

Math tests need no sandbox and no slot (math_lane.py).

After an infrastructure failure grading is tried once more in another sandbox; a second failure gives internal_error.
Nothing that a candidate does gives internal_error. So a program under which two sandboxes were killed for lack of
memory has exceeded its limit: its process tree can grow faster than it is measured.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry

from nouscoder.config import VerifierSection
from nouscoder.domain.submission import AssertTests, CallTests, MathTests, Submission, TestsReference
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.http_server.fair_queue import FairSlots
from nouscoder.http_server.fair_queue import QueueFull as QueueFull
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.grading.case_workers import OnOutcome as OnOutcome
from nouscoder.verifier.grading.case_workers import SubmissionWork, WorkerGroup, count_error
from nouscoder.verifier.grading.extract import FoundProgram, text_to_grade
from nouscoder.verifier.grading.math_lane import MathLane
from nouscoder.verifier.grading.progress import KillRates, KillTable, SubmissionProgress, hardest_first
from nouscoder.verifier.grading.runs import (
    CandidateLibraries,
    ProvenCheckers,
    has_free_order,
    has_parallel_tests,
    judge_for,
    partner_patience_s,
    program_of,
)
from nouscoder.verifier.grading.setups import ProvenSetups
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock, extended_limits, max_repetitions_s
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate
from nouscoder.verifier.judges.asserting import require_long_python
from nouscoder.verifier.judges.judge import Judge, in_turn, takes_long
from nouscoder.verifier.judges.mathematics import MathLimits
from nouscoder.verifier.judges.users_comparators import load_comparators
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox, with_libraries
from nouscoder.verifier.sandbox.base import (
    CompileFailed,
    OutOfMemory,
    PartnerCompileFailed,
    Program,
    RunResult,
    Sandbox,
    SandboxError,
    longest_run_s,
)

_BLOCKING_CHARS = 64 * 1024  # of a completion; a longer one is searched outside of the event loop
_KILLED_BY_PROGRAM = 2  # one may be due to the machine
_KILLED = f"{_KILLED_BY_PROGRAM} sandboxes in which it ran were killed for lack of memory"


@dataclass(frozen=True, slots=True)
class GradingPolicy:
    """The limits of grading that neither the submission nor the configuration sets."""

    attempts: int = 2
    open_patience_s: float = 150.0  # a compiler on a busy machine takes up to 120 s
    run_grace_s: float = 30.0
    min_worker_left_s: float = 0.01  # no further test worker is opened when each has less than this left to run
    bounds: Bounds = Bounds()

    def run_patience_s(self, program: Program) -> float:
        """Seconds in which a sandbox must report the end of one run."""
        return longest_run_s(extended_limits(program.limits)) + self.run_grace_s

    def attempt_patience_s(self, program: Program, max_submission_s: float, partner_s: float) -> float:
        """Seconds that one sandbox may take for a whole submission, whose last test may begin just in time."""
        longest_s = max_submission_s + max_repetitions_s(program.limits)
        return self.open_patience_s + longest_s + self.run_patience_s(program) + partner_s


class Grader:
    """Grades submissions in the sandboxes of one backend, which must have been started."""

    def __init__(
        self,
        sandbox: Sandbox,
        metrics: VerifierMetrics,
        section: VerifierSection | None = None,
        run_lock: ExclusiveRunLock | None = None,
        policy: GradingPolicy | None = None,
    ) -> None:
        """`run_lock` is shared with other processes that grade on this machine, if there are any."""
        self.backend = sandbox.name
        self._sandbox = sandbox
        self._metrics = metrics
        self._section = section or VerifierSection()
        load_comparators(self._section.comparators)
        self._policy = policy or GradingPolicy()
        self._run_lock = run_lock or ExclusiveRunLock()
        self._kill_rates = KillRates()
        self._libraries = CandidateLibraries(sandbox)
        self._checkers = ProvenCheckers(sandbox)
        self._setups = ProvenSetups(sandbox)
        self._has_slots = asyncio.Event()
        self._has_slots.set()
        self._tell_demand: Callable[[], None] = lambda: None
        self.num_slots = sandbox.num_slots - self._section.tools.sessions  # submissions that can run at once
        self._slots = FairSlots(self.num_slots, self._section.max_queue, self._report_load, metrics.waited)
        math_limits = MathLimits(total_s=self._section.max_submission_s)
        self.mathematics = MathLane(self.num_slots, self._section.max_queue, metrics, math_limits)
        metrics.scraped.queue = lambda: (self._slots.oldest_s, self._slots.num_clients)

    @property
    def unfinished(self) -> int:
        """Submissions that wait or run."""
        return self._num_programs + self.mathematics.unfinished

    @property
    def _num_programs(self) -> int:
        return self._slots.waiting + self._slots.busy - self._slots.extra

    def follow(self, sandbox: Sandbox) -> None:
        """Let submissions wait in the queue while slots of `sandbox`, the one of this grader, are not usable."""

        def resize() -> None:
            usable = sandbox.usable_slots - self._section.tools.sessions
            self._slots.resize(max(0, usable))
            (self._has_slots.set if usable > 0 else self._has_slots.clear)()

        sandbox.watch_slots(resize)
        self._tell_demand = lambda: sandbox.demand(self._num_programs)
        resize()

    def _report_load(self, waiting: int, busy: int) -> None:
        self._metrics.load(waiting, busy, self.num_slots)
        self._tell_demand()

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """The verdict of one submission. `on_outcome` is called for each test once its outcome is final.

        Raises InvalidSubmission when the submission cannot be graded, and QueueFull when too many wait.
        """
        validate(submission, self._policy.bounds)
        begun = time.monotonic()
        if submission.code is not None:
            found: FoundProgram | None = FoundProgram(submission.code, submission.language)
        elif len(submission.completion or "") <= _BLOCKING_CHARS:
            found = text_to_grade(submission)
        else:
            found = await asyncio.to_thread(text_to_grade, submission)
        if found is not None:
            submission = submission.in_language(found.language)
        judge = await _judge(submission)
        if found is None:
            progress = self._progress(submission, judge, begun, None)
            verdict = progress.ended(VerdictKind.NO_CODE, "the completion holds no code")
        elif isinstance(submission.tests, MathTests):
            progress = self._progress(submission, judge, begun, None)
            verdict = await self.mathematics.grade(submission.tests, found.code, progress, on_outcome)
        else:
            verdict = await self._in_slot(submission, found.code, judge, begun, on_outcome)
        self._metrics.graded(verdict, current_caller().client)
        return verdict

    async def _in_slot(
        self, submission: Submission, code: str, judge: Judge, begun: float, on_outcome: OnOutcome | None
    ) -> Verdict:
        program = program_of(submission, code, judge, begun)
        work = SubmissionWork(
            sandbox=self._sandbox,
            submission=submission,
            program=program,
            judge=judge,
            run_lock=self._run_lock,
            metrics=self._metrics,
            open_patience_s=self._policy.open_patience_s,
            run_patience_s=self._policy.run_patience_s(program),
            on_outcome=on_outcome,
        )
        caller = current_caller()
        async with self._slots.slot(caller.client, in_background=caller.in_background):
            if isinstance(submission.tests, AssertTests | CallTests) and submission.language == "python":
                await require_long_python(submission.tests)
            is_free = has_free_order(submission)
            learned = self._kill_rates.table(caller.client, submission, judge) if is_free else None
            progress = self._progress(submission, judge, begun, learned)
            verdict = await self._attempts(work, progress)
        if learned is not None:
            learned.learn(verdict.tests)
        return verdict

    async def close(self) -> None:
        """End what this grader has started beside the sandbox, which is not closed."""
        await self.mathematics.close()

    def _progress(
        self, submission: Submission, judge: Judge, begun: float, learned: KillTable | None
    ) -> SubmissionProgress:
        sizes = [judge.input_size(index) for index in range(judge.num_tests)]
        order = hardest_first(sizes, learned.rates() if learned is not None else None)
        return SubmissionProgress(submission, judge, order, self.backend, begun, self._section.max_submission_s)

    async def run_once(
        self, program: Program, stdin: bytes, files: Mapping[str, bytes], slot_patience_s: float = math.inf
    ) -> tuple[RunResult, float]:
        """Run a program once in a slot, without judging it. Returns its result, and the seconds that compiling took.

        Raises CompileFailed, SandboxError, ValueError for files that the sandbox does not accept, and QueueFull, at
        once or when it got no slot within `slot_patience_s` seconds.
        """
        async with self._slots.slot(current_caller().client, slot_patience_s):
            begun = time.monotonic()
            try:
                async with asyncio.timeout(self._policy.open_patience_s + self._policy.run_patience_s(program)):
                    async with self._sandbox.session(program) as session:
                        compile_s = time.monotonic() - begun
                        async with self._run_lock.shared():
                            return await session.run(stdin, files=files), compile_s
            except CompileFailed as failure:
                failure.wall_time_s = time.monotonic() - begun
                raise
            except TimeoutError:
                raise SandboxError("the sandbox did not answer in time") from None

    async def _attempts(self, work: SubmissionWork, progress: SubmissionProgress) -> Verdict:
        """Run the remaining tests. Each infrastructure failure costs one attempt and one sandbox.

        A sandbox that was killed for lack of memory costs no attempt, because the program may be the reason. It is
        blamed when that happens again.
        """
        submission, program = work.submission, work.program
        max_workers = min(self.num_slots, progress.judge.num_tests) if has_parallel_tests(submission) else 1
        partner_s = partner_patience_s(submission)
        patience_s = self._policy.attempt_patience_s(program, self._section.max_submission_s, partner_s)
        message = ""
        num_failed = num_killed = 0
        while num_failed < self._policy.attempts:
            await self._has_slots.wait()  # as in the queue, for as long as the caller waits
            try:
                async with asyncio.timeout(patience_s):
                    await self._libraries.require(submission)
                    await self._checkers.require(submission)
                    await self._setups.require(submission)
                    await WorkerGroup(progress, self._slots, work, max_workers, self._policy.min_worker_left_s).run()
                return progress.verdict()
            except InvalidSubmission:
                raise
            except PartnerCompileFailed as failure:
                raise InvalidSubmission("tests", f"the judge does not compile: {failure.detail[-2000:]}") from None
            except CompileFailed as failure:
                return progress.ended(VerdictKind.COMPILE_ERROR, failure.detail[-2000:])
            except OutOfMemory as error:
                num_killed += 1
                if num_killed == _KILLED_BY_PROGRAM:
                    return progress.ended(VerdictKind.MEMORY_LIMIT_EXCEEDED, _KILLED)
                count_error(self._metrics, error)
            except Exception as error:
                num_failed += 1
                message = count_error(self._metrics, error)
            max_workers = 1
        return progress.ended(VerdictKind.INTERNAL_ERROR, message)


async def _judge(submission: Submission) -> Judge:
    """The judge. That of the lcb profile reads all cases; the others read a case when they run it."""
    if not submission.profile.is_lcb or isinstance(submission.tests, TestsReference):
        return judge_for(submission)
    if any(takes_long(submission.tests, index) for index in range(len(submission.tests.cases))):
        return await in_turn(judge_for, submission)
    return await asyncio.to_thread(judge_for, submission)  # so that nobody waits behind a large case of another


class Grading(Protocol):
    """The protocol of graders: `Grader` itself, and the decorators around it."""

    backend: str  # the name of the sandbox backend
    num_slots: int  # submissions that can run at once

    @property
    def unfinished(self) -> int:
        """Submissions that wait or run."""

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """The verdict of one submission. Raises InvalidSubmission and QueueFull."""


class GraderDecorator:
    """Forwards every property to `inner`. A subclass implements `grade` by calling `inner.grade`."""

    def __init__(self, inner: Grading) -> None:
        self._inner = inner
        self.backend = inner.backend
        self.num_slots = inner.num_slots

    @property
    def unfinished(self) -> int:
        """Submissions that wait or run."""
        return self._inner.unfinished


@asynccontextmanager
async def local_grader(
    section: VerifierSection, decorate: Callable[[Sandbox], Sandbox] = lambda sandbox: sandbox
) -> AsyncIterator[Grader]:
    """A grader with the configured sandbox, which `decorate` may wrap, for commands that grade without a service.

    Raises ConfigError and SandboxUnavailable.
    """
    sandbox = decorate(open_sandbox(with_libraries(section), section.tools.sessions))
    grader: Grader | None = None
    try:
        await sandbox.start()
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()), section)
        yield grader
    finally:
        if grader is not None:
            await grader.close()
        await sandbox.close()
