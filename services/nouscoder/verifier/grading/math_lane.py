"""Math tests are graded beside the slots for programs.

INVARIANT: a submission with math tests holds no slot, and no program waits for it. At most `num_places` answers are
compared quickly at a time and at most one for each CPU slowly. At most `max_waiting` submissions wait for each; clients
take turns as for slots (fair_queue.py). No answer holds a place for quick comparisons longer than QUICK allows. A place
is free again as soon as the comparison has ended or the caller is cancelled.
"""

from __future__ import annotations

import os

from nouscoder.domain.submission import MathTests
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.http_server.fair_queue import FairSlots
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.grading.case_workers import OnOutcome, count_error, count_failure
from nouscoder.verifier.grading.progress import SubmissionProgress
from nouscoder.verifier.judges.judge import encoded
from nouscoder.verifier.judges.math_worker import End
from nouscoder.verifier.judges.mathematics import QUICK, Compared, MathLimits, MathProcess, compare, rulings_of
from nouscoder.verifier.observe.metrics import FailureCause, VerifierMetrics
from nouscoder.verifier.sandbox.base import Exit, RunResult, SandboxError

_MATH_ATTEMPTS = 2


class MathLane:
    """Grades the math tests of one grader, which need the CPU for a moment, and no sandbox.

    An answer is first compared quickly. The few that take longer are compared again within `limits`, with a low
    priority and at most one for each CPU, so that they slow down neither programs nor other answers.
    """

    def __init__(self, num_places: int, max_waiting: int, metrics: VerifierMetrics, limits: MathLimits) -> None:
        self.process = MathProcess()
        self.limits = limits
        self._metrics = metrics
        num_cpus = len(os.sched_getaffinity(0))
        self._quick = FairSlots(num_places, max_waiting, lambda waiting, busy: None, metrics.waited)
        self._slow = FairSlots(num_cpus, max_waiting, lambda waiting, busy: None)
        quick, slow = self._quick, self._slow
        metrics.scraped.math = lambda: (quick.waiting + slow.waiting, quick.busy + slow.busy)

    @property
    def unfinished(self) -> int:
        """Submissions that wait or are compared."""
        return self._quick.waiting + self._quick.busy + self._slow.waiting + self._slow.busy

    async def grade(
        self, tests: MathTests, answer: str, progress: SubmissionProgress, on_outcome: OnOutcome | None
    ) -> Verdict:
        """The verdict on an answer. Raises QueueFull. Nothing that the answer does gives internal_error."""
        message = ""
        for _ in range(_MATH_ATTEMPTS):
            try:
                compared = await self._compared(tests, answer)
            except SandboxError as error:
                message = count_error(self._metrics, error)
            else:
                rulings = rulings_of(compared, len(tests.cases), self.limits)
                shown = RunResult(Exit.EXITED, 0, 0, 0.0, 0.0, 0, encoded(answer), b"")
                while (index := progress.take()) is not None:
                    if rulings[index].outcome is VerdictKind.INTERNAL_ERROR:
                        count_failure(self._metrics, FailureCause.JUDGE, rulings[index].remark)
                    for outcome in await progress.record(index, shown, rulings[index]):
                        self._metrics.tested(outcome)
                        if on_outcome is not None:
                            on_outcome(outcome)
                return progress.verdict()
        return progress.ended(VerdictKind.INTERNAL_ERROR, message)

    async def _compared(self, tests: MathTests, answer: str) -> Compared:
        caller = current_caller()
        async with self._quick.slot(caller.client, in_background=caller.in_background):
            compared = await compare(self.process, tests, answer, QUICK)
        if compared.end is not End.LATE:
            return compared
        async with self._slow.slot(caller.client, in_background=caller.in_background):
            return await compare(self.process, tests, answer, self.limits, compared)

    async def close(self) -> None:
        """End the process. Answers that are being compared get internal_error."""
        await self.process.close()
