"""The work of a submission's test workers: open a sandbox, run a test within its limits, report the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import TestOutcome, VerdictKind
from nouscoder.verifier.grading.exclusive_run import ExclusiveRunLock, ExclusiveRunTimeout
from nouscoder.verifier.grading.failures import count_error, count_failure
from nouscoder.verifier.grading.runs import Ran, Runs, open_runs, partner_patience_s
from nouscoder.verifier.grading.time_limits import Repetitions, extended_limits, repetition, run_with_time_limits
from nouscoder.verifier.judges.base import Judge
from nouscoder.verifier.observe.metrics import FailureCause, VerifierMetrics
from nouscoder.verifier.sandbox.base import CompileStarved, Program, Sandbox

Got = TypeVar("Got")
OnOutcome = Callable[[TestOutcome], None]


@dataclass(frozen=True, slots=True)
class SubmissionWork:
    """Implements `Work`. `open_patience_s` and `run_patience_s`: seconds until a silent sandbox counts as failed."""

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
    async def open(self) -> AsyncIterator[Runs]:
        """See `Work.open`."""
        async with AsyncExitStack() as stack:
            try:
                runs = await self._opened(stack)
            except CompileStarved as starved:
                runs = await self._opened_alone(stack, starved)
            yield runs

    async def _opened(self, stack: AsyncExitStack) -> Runs:
        enforced = replace(self.program, limits=extended_limits(self.program.limits))
        async with asyncio.timeout(self.open_patience_s):
            return await stack.enter_async_context(open_runs(self.sandbox, self.submission, enforced, self.judge))

    async def _opened_alone(self, stack: AsyncExitStack, starved: CompileStarved) -> Runs:
        """Open a sandbox while no run is in progress. Raises `starved` when the machine does not become free."""
        if self.repetitions.are_over:
            raise starved
        try:
            async with repetition(self.run_lock, self.repetitions):
                return await self._opened(stack)
        except ExclusiveRunTimeout:
            raise starved from None

    async def run(self, runs: Runs, index: int) -> Ran:
        """See `Work.run`."""
        patience_s = self.run_patience_s + partner_patience_s(self.submission)
        run = partial(_within, patience_s, partial(runs.run, index))
        result, ruling = await run_with_time_limits(run, self.program.limits, self.run_lock, self.repetitions)
        if ruling is not None and ruling.outcome is VerdictKind.INTERNAL_ERROR:
            count_failure(self.metrics, FailureCause.JUDGE, ruling.remark)
        return result, ruling

    def report(self, outcome: TestOutcome) -> None:
        """See `Work.report`."""
        self.metrics.tested(outcome)
        if self.on_outcome is not None:
            self.on_outcome(outcome)

    def worker_opened(self) -> None:
        """See `Work.worker_opened`."""
        self.metrics.worker_opened()

    def worker_failed(self, error: Exception) -> None:
        """See `Work.worker_failed`."""
        count_error(self.metrics, error)


async def _within(patience_s: float, run: Callable[[], Awaitable[Got]]) -> Got:
    """The result of `run`. Raises TimeoutError when it takes longer than `patience_s` seconds."""
    async with asyncio.timeout(patience_s):
        return await run()
