"""The test workers of one submission. Each has its own sandbox and runs one test at a time.

A submission starts with one worker. A further worker is opened only while a slot is idle, no submission waits, and each
worker has clearly more work left than the opening of a sandbox costs. A loaded service therefore gives every submission
one worker.

INVARIANT: every worker except one holds an extra slot and gives it back when it ends. While another submission waits, a
worker ends before its next test if another worker of its submission continues. A worker ends at once when the verdict
no longer depends on its test. When a worker fails, another one runs its test again, no further workers are opened, and
the failure is raised only if it was the last worker. When `run` ends, no worker, task or extra slot is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import TestOutcome, VerdictKind
from nouscoder.http_server.fair_queue import FairSlots
from nouscoder.verifier.grading.progress import SubmissionProgress
from nouscoder.verifier.grading.runs import Ran, RunCase, open_runs, partner_patience_s
from nouscoder.verifier.grading.time_limits import (
    ExclusiveRunLock,
    ExclusiveRunTimeout,
    Repetitions,
    extended_limits,
    repetition,
    run_with_time_limits,
)
from nouscoder.verifier.judges.judge import Judge
from nouscoder.verifier.judges.rulings import Ruling
from nouscoder.verifier.judges.users_comparators import ComparatorFailed
from nouscoder.verifier.observe.metrics import FailureCause, VerifierMetrics
from nouscoder.verifier.sandbox.base import CompileFailed, CompileStarved, Program, RunResult, Sandbox, SandboxError

OnOutcome = Callable[[TestOutcome], None]
# A further worker is opened when each worker has more than this multiple of the opening time left to run. At three
# times, two workers finish sooner than one by at least the cost of the second opening. Measured with `local` on two
# cores: opening takes 3.4 ms and a trivial Python test 2.5 ms; compiling C++ takes 0.5 s.
MIN_LEFT_PER_OPENING = 3.0
_ENDING = -1
_Worker = asyncio.Task[None]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SubmissionWork:
    """What a worker does: open a sandbox, run a test within its limits, and report the outcome.

    `open_patience_s` and `run_patience_s`: seconds until a silent sandbox counts as failed.
    """

    sandbox: Sandbox
    submission: Submission
    program: Program
    judge: Judge
    run_lock: ExclusiveRunLock
    metrics: VerifierMetrics
    open_patience_s: float
    run_patience_s: float
    on_outcome: OnOutcome | None = None
    repetitions: Repetitions = field(default_factory=Repetitions)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunCase]:
        """Open a fresh sandbox. Raises CompileFailed, SandboxError and TimeoutError on entry."""
        async with AsyncExitStack() as stack:
            try:
                run_case = await self._opened(stack)
            except CompileStarved as starved:
                run_case = await self._opened_alone(stack, starved)
            yield run_case

    async def _opened(self, stack: AsyncExitStack) -> RunCase:
        enforced = replace(self.program, limits=extended_limits(self.program.limits))
        async with asyncio.timeout(self.open_patience_s):
            return await stack.enter_async_context(open_runs(self.sandbox, self.submission, enforced, self.judge))

    async def _opened_alone(self, stack: AsyncExitStack, starved: CompileStarved) -> RunCase:
        """Open a sandbox while no run is in progress. Raises `starved` when the machine does not become free."""
        if self.repetitions.are_over:
            raise starved
        try:
            async with repetition(self.run_lock, self.repetitions):
                return await self._opened(stack)
        except ExclusiveRunTimeout:
            raise starved from None

    async def run(self, run_case: RunCase, index: int) -> tuple[RunResult, Ruling | None, float]:
        """Run one test. Returns also the seconds for which the run that counts used its slot, without waits for others.

        With the lcb profile it is 0: one run is that of all tests, and their wall times are its parts. Raises
        SandboxError and TimeoutError.
        """
        patience_s = self.run_patience_s + partner_patience_s(self.submission)
        spent_s = 0.0

        async def run() -> Ran:
            nonlocal spent_s
            begun_s = time.monotonic()
            async with asyncio.timeout(patience_s):
                ran = await run_case(index)
            spent_s = 0.0 if self.submission.profile.is_lcb else time.monotonic() - begun_s
            return ran

        result, ruling = await run_with_time_limits(run, self.program.limits, self.run_lock, self.repetitions)
        if ruling is not None and ruling.outcome is VerdictKind.INTERNAL_ERROR:
            count_failure(self.metrics, FailureCause.JUDGE, ruling.remark)
        return result, ruling, spent_s

    def report(self, outcome: TestOutcome) -> None:
        """An outcome has become final."""
        self.metrics.tested(outcome)
        if self.on_outcome is not None:
            self.on_outcome(outcome)

    def worker_opened(self) -> None:
        """A further worker is being opened."""
        self.metrics.worker_opened()

    def worker_failed(self, error: Exception) -> None:
        """A worker ended because of an infrastructure failure; other workers continue."""
        count_error(self.metrics, error)


class WorkerGroup:
    """The workers of one attempt at a submission that already holds its slot."""

    def __init__(
        self,
        progress: SubmissionProgress,
        slots: FairSlots,
        work: SubmissionWork,
        max_workers: int,
        min_left_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `max_workers` at once; none is added while each worker has less than `min_left_s` seconds left."""
        self._progress = progress
        self._slots = slots
        self._work = work
        self._max_workers = max_workers
        self._min_left_s = min_left_s
        self._clock = clock
        self._active: dict[_Worker, int | None] = {}  # the test of each worker; None while its sandbox opens
        self._num_workers = 0  # includes those that are ending
        self._open_s: float | None = None  # the shortest opening time so far
        self._tests_s = 0.0
        self._num_tests = 0
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Run tests until the verdict is known. Raises the failure of the last worker if it ended grading early."""
        if self._progress.is_known:
            return
        async with asyncio.TaskGroup() as group:
            if self._max_workers > 1:
                self._start_worker(group)
            else:  # in this task
                me = asyncio.current_task()
                assert me is not None
                self._active[me] = None
                self._num_workers += 1
                try:
                    await self._run_worker(group)
                finally:
                    self._ended(me)
        if self._failure is not None:
            raise self._failure
        if not self._progress.is_known:
            raise SandboxError("every test worker ended before the verdict was known")

    def _start_worker(self, group: asyncio.TaskGroup) -> None:
        worker = group.create_task(self._run_worker(group))
        self._active[worker] = None
        self._num_workers += 1
        worker.add_done_callback(self._ended)  # a callback, because a task can be cancelled before its first step

    def _ended(self, worker: _Worker) -> None:
        self._active.pop(worker, None)
        self._num_workers -= 1
        if self._num_workers:
            self._slots.give_back_extra()

    async def _run_worker(self, group: asyncio.TaskGroup) -> None:
        me = asyncio.current_task()
        assert me is not None
        begun_s = self._clock()
        try:
            async with self._work.open() as run_case:
                took_s = self._clock() - begun_s
                self._open_s = took_s if self._open_s is None else min(took_s, self._open_s)
                while (index := self._next_test(me, group)) is not None:
                    await self._run_test(run_case, index)
                    self._abandon_unneeded(me)
        except Exception as error:
            self._failed(me, error)

    def _next_test(self, me: _Worker, group: asyncio.TaskGroup) -> int | None:
        """The next test of this worker; None when the worker must end. Workers take tests here and nowhere else."""
        yields_slot = self._slots.waiting and any(
            index is not None for worker, index in self._active.items() if worker is not me
        )
        index = None if yields_slot else self._progress.take()
        if index is None:
            del self._active[me]
            return None
        self._active[me] = index
        while self._another_pays() and self._slots.take_extra():
            self._work.worker_opened()
            self._start_worker(group)
        return index

    def _another_pays(self) -> bool:
        if len(self._active) >= self._max_workers or not self._num_tests or self._open_s is None:
            return False
        left_s = self._progress.num_left * self._tests_s / self._num_tests / len(self._active)
        return left_s > max(self._min_left_s, MIN_LEFT_PER_OPENING * self._open_s)

    async def _run_test(self, run_case: RunCase, index: int) -> None:
        begun_s = self._clock()
        try:
            result, ruling, spent_s = await self._work.run(run_case, index)
            final = await self._progress.record(index, result, ruling, spent_s)
        except BaseException:
            self._progress.give_back(index)
            raise
        self._num_tests += 1
        self._tests_s += self._clock() - begun_s
        for outcome in final:
            self._work.report(outcome)

    def _abandon_unneeded(self, me: _Worker) -> None:
        """Cancel workers whose test the verdict no longer depends on, and opening workers with no test left to take."""
        for worker, index in list(self._active.items()):
            needed = self._progress.num_left if index is None else self._progress.counts(index)
            if worker is not me and not needed:
                del self._active[worker]
                worker.cancel()

    def _failed(self, me: _Worker, error: Exception) -> None:
        was_active = self._active.pop(me, _ENDING) is not _ENDING
        self._max_workers = 1
        if isinstance(error, CompileFailed) and self._open_s is not None:
            error = SandboxError("a second sandbox failed to compile code that the first one compiled")
        if was_active and not self._active:
            self._failure = error
        else:
            self._work.worker_failed(error)


def count_failure(metrics: VerifierMetrics, cause: FailureCause, message: str) -> str:
    """Count and log an infrastructure failure, whose only verdict is internal_error. Returns `message`."""
    metrics.failed(cause)
    log.warning("internal error", extra={"cause": cause.value, "detail": message[:500]})
    return message


def count_error(metrics: VerifierMetrics, error: Exception) -> str:
    """Count and log an exception raised while grading. Returns the verdict's message."""
    match error:
        case TimeoutError():
            return count_failure(metrics, FailureCause.SANDBOX_SILENT, "the sandbox did not answer in time")
        case ComparatorFailed():
            return count_failure(metrics, FailureCause.GRADER, str(error))
        case SandboxError():
            return count_failure(metrics, FailureCause.SANDBOX, str(error))
    log.error("grading failed", exc_info=error)
    return count_failure(metrics, FailureCause.GRADER, f"{type(error).__name__} in the grader")
