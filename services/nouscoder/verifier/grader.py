"""Grading: a submission in, a verdict out.

extract code -> wait for a slot -> fresh sandbox -> tests, hardest first -> outcome of each -> verdict.

INVARIANT: a submission that `grade` takes in gets exactly one verdict, unless its caller is cancelled; at most
`sandbox.num_slots` submissions hold a sandbox and at most `max_queue` wait for one; a slot is free again as soon as
the verdict is known, the caller is cancelled or the sandbox has failed.

A failure of ours is tried again once in another sandbox, then answered as internal_error; whatever the candidate does,
the answer is one of the other verdicts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.submission import Submission
from nouscoder.verdict import TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.extract import text_to_grade
from nouscoder.verifier.metrics import VerifierMetrics
from nouscoder.verifier.progress import Progress
from nouscoder.verifier.runs import open_runs, partner_patience_s, program_of
from nouscoder.verifier.sandbox.base import CompileFailed, PartnerCompileFailed, Program, Sandbox, SandboxError
from nouscoder.verifier.validation import Bounds, InvalidSubmission, validate

log = logging.getLogger(__name__)

OnOutcome = Callable[[TestOutcome], None]


class FailureCause(StrEnum):
    """Why the infrastructure failed: the label of `verifier_internal_errors_total`."""

    SANDBOX = "sandbox"  # the backend said so
    SANDBOX_SILENT = "sandbox_silent"  # the backend did not answer in time
    GRADER = "grader"  # a fault in the gateway itself
    JUDGE = "judge"  # a checker or an interactor failed, or a gold answer cannot be read


class QueueFull(Exception):
    """Too many submissions wait; try again in `retry_after_s` seconds."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full, try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class GradingPolicy:
    """Every limit of grading that is not the candidate's own."""

    max_queue: int = 1024
    attempts: int = 2
    open_patience_s: float = 60.0
    run_grace_s: float = 30.0
    max_submission_s: float = 600.0
    bounds: Bounds = Bounds()

    def run_patience_s(self, program: Program) -> float:
        """Seconds in which a sandbox must have told how one run ended."""
        return program.limits.wall_time_s + self.run_grace_s

    def attempt_patience_s(self, program: Program) -> float:
        """Seconds that one sandbox may take for a whole submission."""
        return self.open_patience_s + self.max_submission_s + self.run_patience_s(program)


class Grader:
    """Grades submissions in the sandboxes of one backend, which must have been started."""

    def __init__(self, sandbox: Sandbox, metrics: VerifierMetrics, policy: GradingPolicy | None = None) -> None:
        self._sandbox = sandbox
        self._metrics = metrics
        self._policy = policy or GradingPolicy()
        self._slots = asyncio.Semaphore(sandbox.num_slots)
        self._waiting = 0
        self._busy = 0
        self._mean_s = 0.1
        self._tell_load()

    @property
    def backend(self) -> str:
        """Name of the sandbox backend."""
        return self._sandbox.name

    @property
    def num_slots(self) -> int:
        """Submissions that can run at once."""
        return self._sandbox.num_slots

    @property
    def unfinished(self) -> int:
        """Submissions that wait or run."""
        return self._waiting + self._busy

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """The verdict of one submission; `on_outcome` hears of each test as it ends.

        Raises InvalidSubmission when it cannot be graded as it stands and QueueFull when too many wait.
        """
        validate(submission, self._policy.bounds)
        begun = time.monotonic()
        code = text_to_grade(submission)
        progress = Progress(submission, self._sandbox.name, begun)
        if code is None:
            verdict = progress.ended(VerdictKind.NO_CODE, "the completion holds no code")
        else:
            program = program_of(submission, code, progress.judge)
            async with self._slot():
                verdict = await self._attempts(submission, program, progress, on_outcome)
        self._metrics.graded(verdict)
        return verdict

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._slots.locked() and self._waiting >= self._policy.max_queue:
            raise QueueFull(self._retry_after_s())
        self._waiting += 1
        self._tell_load()
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
            self._tell_load()
        self._busy += 1
        self._tell_load()
        begun = time.monotonic()
        try:
            yield
        finally:
            self._mean_s += 0.1 * (time.monotonic() - begun - self._mean_s)
            self._busy -= 1
            self._slots.release()
            self._tell_load()

    def _retry_after_s(self) -> int:
        """Whole seconds in which about half the queue should be gone."""
        return max(1, min(60, round(self._waiting / 2 * self._mean_s / self._sandbox.num_slots)))

    def _tell_load(self) -> None:
        self._metrics.load(self._waiting, self._busy, self._sandbox.num_slots)

    async def _attempts(
        self, submission: Submission, program: Program, progress: Progress, on_outcome: OnOutcome | None
    ) -> Verdict:
        """Run what is left of the tests until done; each failure of ours costs one attempt and one sandbox."""
        message = ""
        for _ in range(self._policy.attempts):
            try:
                async with asyncio.timeout(self._policy.attempt_patience_s(program)):
                    return await self._attempt(submission, program, progress, on_outcome)
            except PartnerCompileFailed as failure:
                raise InvalidSubmission("tests", f"the judge does not compile: {failure.detail[-2000:]}") from None
            except CompileFailed as failure:
                return progress.ended(VerdictKind.COMPILE_ERROR, failure.detail[-2000:])
            except TimeoutError:
                message = self._count(FailureCause.SANDBOX_SILENT, "the sandbox did not answer in time")
            except SandboxError as error:
                message = self._count(FailureCause.SANDBOX, str(error))
            except Exception as error:
                log.exception("grading failed")
                message = self._count(FailureCause.GRADER, f"{type(error).__name__} in the grader")
        return progress.ended(VerdictKind.INTERNAL_ERROR, message)

    def _count(self, cause: FailureCause, message: str) -> str:
        self._metrics.failed(cause.value)
        log.warning("internal error", extra={"cause": cause.value, "detail": message[:500]})
        return message

    async def _attempt(
        self, submission: Submission, program: Program, progress: Progress, on_outcome: OnOutcome | None
    ) -> Verdict:
        patience_s = self._policy.run_patience_s(program) + partner_patience_s(submission)
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self._policy.open_patience_s):
                opened = open_runs(self._sandbox, submission, program, progress.judge)
                runs = await stack.enter_async_context(opened)
            while (index := progress.next_test()) is not None:
                if progress.spent_s > self._policy.max_submission_s:
                    limit = f"its tests together took more than {self._policy.max_submission_s:g} s"
                    return progress.ended(VerdictKind.TIME_LIMIT_EXCEEDED, limit)
                async with asyncio.timeout(patience_s):
                    result, ruling = await runs.run(index)
                if ruling is not None and ruling.outcome is VerdictKind.INTERNAL_ERROR:
                    self._count(FailureCause.JUDGE, ruling.remark)
                outcome = await progress.record(index, result, ruling)
                self._metrics.tested(outcome)
                if on_outcome is not None:
                    on_outcome(outcome)
        return progress.verdict()
