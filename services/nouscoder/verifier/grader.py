"""Grading: a submission in, a verdict out.

extract code -> wait for a slot -> fresh sandbox -> tests, hardest first -> outcome of each -> verdict.

INVARIANT: a submission that `grade` takes in gets exactly one verdict, unless its caller is cancelled or the queue
refuses it; at most `sandbox.num_slots` submissions hold a sandbox and at most `max_queue` wait for one; a slot is free
again as soon as the verdict is known, the caller is cancelled or the sandbox has failed.

A failure of ours is tried again once in another sandbox, then answered as internal_error; whatever the candidate does,
the answer is one of the other verdicts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

from nouscoder.submission import Submission
from nouscoder.verdict import TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.caller import current_caller
from nouscoder.verifier.crowd import Crowd
from nouscoder.verifier.extract import text_to_grade
from nouscoder.verifier.fair_queue import FairSlots
from nouscoder.verifier.fair_queue import QueueFull as QueueFull
from nouscoder.verifier.metrics import VerifierMetrics
from nouscoder.verifier.progress import Progress
from nouscoder.verifier.runs import open_runs, partner_patience_s, program_of
from nouscoder.verifier.sandbox.base import (
    CompileFailed,
    PartnerCompileFailed,
    Program,
    RunResult,
    Sandbox,
    SandboxError,
)
from nouscoder.verifier.timed import run_timed, stretched
from nouscoder.verifier.validation import Bounds, InvalidSubmission, validate

log = logging.getLogger(__name__)

Ran = TypeVar("Ran")
OnOutcome = Callable[[TestOutcome], None]


class FailureCause(StrEnum):
    """Why the infrastructure failed: the label of `verifier_internal_errors_total`."""

    SANDBOX = "sandbox"  # the backend said so
    SANDBOX_SILENT = "sandbox_silent"  # the backend did not answer in time
    GRADER = "grader"  # a fault in the gateway itself
    JUDGE = "judge"  # a checker or an interactor failed, or a gold answer cannot be read


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
        return stretched(program.limits).wall_time_s + self.run_grace_s

    def attempt_patience_s(self, program: Program) -> float:
        """Seconds that one sandbox may take for a whole submission."""
        return self.open_patience_s + self.max_submission_s + self.run_patience_s(program)


class Grader:
    """Grades submissions in the sandboxes of one backend, which must have been started."""

    def __init__(self, sandbox: Sandbox, metrics: VerifierMetrics, policy: GradingPolicy | None = None) -> None:
        self._sandbox = sandbox
        self._metrics = metrics
        self._policy = policy or GradingPolicy()
        self._crowd = Crowd()
        self._slots = FairSlots(
            sandbox.num_slots,
            self._policy.max_queue,
            lambda waiting, busy: metrics.load(waiting, busy, sandbox.num_slots),
        )

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
        return self._slots.waiting + self._slots.busy

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
            async with self._slots.slot(current_caller().client):
                verdict = await self._attempts(submission, program, progress, on_outcome)
        self._metrics.graded(verdict)
        return verdict

    async def run_once(self, program: Program, stdin: bytes, files: Mapping[str, bytes]) -> RunResult:
        """One run of a program that nobody judges, in a slot like any other's.

        Raises CompileFailed, SandboxError, QueueFull, and ValueError for files that cannot be given.
        """
        async with self._slots.slot(current_caller().client):
            try:
                async with asyncio.timeout(self._policy.open_patience_s + self._policy.run_patience_s(program)):
                    async with self._sandbox.session(program) as session, self._crowd.among_others():
                        return await session.run(stdin, files=files)
            except TimeoutError:
                raise SandboxError("the sandbox did not answer in time") from None

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
                enforced = replace(program, limits=stretched(program.limits))
                opened = open_runs(self._sandbox, submission, enforced, progress.judge)
                runs = await stack.enter_async_context(opened)
            while (index := progress.next_test()) is not None:
                if progress.spent_s > self._policy.max_submission_s:
                    limit = f"its tests together took more than {self._policy.max_submission_s:g} s"
                    return progress.ended(VerdictKind.TIME_LIMIT_EXCEEDED, limit)
                run = partial(_within, patience_s, partial(runs.run, index))
                result, ruling = await run_timed(run, program.limits, self._crowd)
                if ruling is not None and ruling.outcome is VerdictKind.INTERNAL_ERROR:
                    self._count(FailureCause.JUDGE, ruling.remark)
                outcome = await progress.record(index, result, ruling)
                self._metrics.tested(outcome)
                if on_outcome is not None:
                    on_outcome(outcome)
        return progress.verdict()


async def _within(patience_s: float, run: Callable[[], Awaitable[Ran]]) -> Ran:
    """What one run gave. Raises TimeoutError when the sandbox is silent for `patience_s` seconds."""
    async with asyncio.timeout(patience_s):
        return await run()
