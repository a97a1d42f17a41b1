"""How far one submission is: which tests are left, what the others got, and the verdict that follows.

INVARIANT: a test is recorded once at most, and after `next_test` has answered None nothing more is asked for.
"""

from __future__ import annotations

import asyncio
import time

from nouscoder.submission import Profile, Submission
from nouscoder.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.judges.partners import Ruling
from nouscoder.verifier.judging import failure_of, judge_for, outcome_of
from nouscoder.verifier.order import hardest_first
from nouscoder.verifier.sandbox.base import RunResult

_LARGE_BYTES = 1_000_000


class Progress:
    """The state of grading one submission. It survives a failed sandbox: tests already judged are not run again."""

    def __init__(self, submission: Submission, backend: str, begun: float) -> None:
        """`begun` is the time.monotonic() at which the submission came in."""
        self.judge = judge_for(submission)
        self.spent_s = 0.0
        self._submission = submission
        self._backend = backend
        self._begun = begun
        self._left = hardest_first([self.judge.input_size(index) for index in range(self.judge.num_tests)])[::-1]
        self._outcomes: dict[int, TestOutcome] = {}
        self._failure: FirstFailure | None = None
        # LiveCodeBench's grader knows nothing of the tests after the first failure.
        self._stops = submission.stop_on_first_failure or submission.profile is Profile.LCB
        self._detail = ""

    def next_test(self) -> int | None:
        """The test to run now, the same until it is recorded; None when the verdict is known."""
        if not self._left or (self._failure is not None and self._stops):
            return None
        return self._left[-1]

    async def record(self, index: int, result: RunResult, ruling: Ruling | None = None) -> TestOutcome:
        """Judge what the process of `next_test` did; large outputs in a thread, to keep the service answering.

        `ruling` is what a checker, an interactor or a library has said of it, and counts if there is one.
        """
        if index != self.next_test():
            raise ValueError(f"test {index} is not the one to record now")
        if ruling is not None:
            kind = ruling.outcome
        elif len(result.stdout) > _LARGE_BYTES or len(result.result or b"") > _LARGE_BYTES:
            kind = await asyncio.to_thread(outcome_of, self.judge, index, result)
        else:
            kind = outcome_of(self.judge, index, result)
        outcome = TestOutcome(index, kind, result.wall_time_s, result.cpu_time_s, result.memory_bytes)
        self._left.pop()
        self._outcomes[index] = outcome
        self.spent_s += result.wall_time_s
        if kind is not VerdictKind.ACCEPTED and (self._failure is None or index < self._failure.index):
            remark = "" if ruling is None else ruling.remark
            self._failure = failure_of(self.judge, index, kind, result, remark)
            self._detail = remark if kind is VerdictKind.INTERNAL_ERROR else ""
        return outcome

    def verdict(self) -> Verdict:
        """The verdict once no test is left to run: that of the first failure, if there is one."""
        return self.ended(VerdictKind.ACCEPTED if self._failure is None else self._failure.outcome, self._detail)

    def ended(self, kind: VerdictKind, detail: str) -> Verdict:
        """A verdict of this kind over what has been recorded so far."""
        outcomes = tuple(self._outcomes[index] for index in sorted(self._outcomes))
        return Verdict(
            kind=kind,
            passed=sum(outcome.outcome is VerdictKind.ACCEPTED for outcome in outcomes),
            total=self.judge.num_tests,
            graded=len(outcomes),
            duration_s=time.monotonic() - self._begun,
            backend=self._backend,
            tests=outcomes,
            first_failure=self._failure if self._submission.reveal else None,
            detail=detail,
        )
