"""What the lanes of one submission do: open its sandbox, run a test of it in time, and tell who wants to know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import TestOutcome, VerdictKind
from nouscoder.verifier.grading.exclusive_run import Crowd
from nouscoder.verifier.grading.failures import count_error, count_failure
from nouscoder.verifier.grading.runs import Ran, Runs, open_runs, partner_patience_s
from nouscoder.verifier.grading.time_limits import run_timed, stretched
from nouscoder.verifier.judges.base import Judge
from nouscoder.verifier.observe.metrics import FailureCause, VerifierMetrics
from nouscoder.verifier.sandbox.base import Program, Sandbox

Got = TypeVar("Got")
OnOutcome = Callable[[TestOutcome], None]


@dataclass(frozen=True, slots=True)
class LaneWork:
    """`open_patience_s` and `run_patience_s`: seconds after which a sandbox that says nothing is given up."""

    sandbox: Sandbox
    submission: Submission
    program: Program
    judge: Judge
    crowd: Crowd
    metrics: VerifierMetrics
    open_patience_s: float
    run_patience_s: float
    on_outcome: OnOutcome | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Runs]:
        """See `Work.open`."""
        enforced = replace(self.program, limits=stretched(self.program.limits))
        opened = open_runs(self.sandbox, self.submission, enforced, self.judge)
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self.open_patience_s):
                runs = await stack.enter_async_context(opened)
            yield runs

    async def run(self, runs: Runs, index: int) -> Ran:
        """See `Work.run`."""
        patience_s = self.run_patience_s + partner_patience_s(self.submission)
        run = partial(_within, patience_s, partial(runs.run, index))
        result, ruling = await run_timed(run, self.program.limits, self.crowd)
        if ruling is not None and ruling.outcome is VerdictKind.INTERNAL_ERROR:
            count_failure(self.metrics, FailureCause.JUDGE, ruling.remark)
        return result, ruling

    def told(self, outcome: TestOutcome) -> None:
        """See `Work.told`."""
        self.metrics.tested(outcome)
        if self.on_outcome is not None:
            self.on_outcome(outcome)

    def lane_opened(self) -> None:
        """See `Work.lane_opened`."""
        self.metrics.lane_opened()

    def lane_broke(self, error: Exception) -> None:
        """See `Work.lane_broke`."""
        count_error(self.metrics, error)


async def _within(patience_s: float, run: Callable[[], Awaitable[Got]]) -> Got:
    """What one run gave. Raises TimeoutError when the sandbox is silent for `patience_s` seconds."""
    async with asyncio.timeout(patience_s):
        return await run()
