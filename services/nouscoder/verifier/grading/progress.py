"""The progress of one submission: the tests that are left, the outcomes so far, and the verdict.

Each test has a position; position 0 runs first (test_order.py). Test workers take tests in that order and record them
in any order.

INVARIANT: outcomes and verdict equal those of one worker that runs the positions in sequence, whatever the order in
which tests are recorded. An outcome becomes final, and is reported, once all earlier positions are final. No outcome
counts after the one that ends grading: the first failure of a submission that stops there, or the outcome with which
the submission exceeds its total time. At most one worker has a test at a time, and a test is recorded at most once. A
returned test is handed out again before all others.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nouscoder.domain.submission import Profile, Submission
from nouscoder.domain.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.grading.long_work import in_turn
from nouscoder.verifier.judges.comparators import SMALL_BYTES
from nouscoder.verifier.judges.judge import Judge, failure_of, outcome_of, stderr_of, takes_long
from nouscoder.verifier.judges.rulings import Ruling
from nouscoder.verifier.sandbox.base import RunResult

_STDERR_CHARS = 1_000_000  # of all tests of a submission together; later tests have none


@dataclass(frozen=True, slots=True)
class _Judged:
    """The outcome of a test. `failure` is None when it passed. `fault` names an infrastructure failure, or is ""."""

    outcome: TestOutcome
    failure: FirstFailure | None
    fault: str


class Progress:
    """The state of grading one submission. It survives a failed sandbox: judged tests are not run again."""

    def __init__(
        self,
        submission: Submission,
        judge: Judge,
        order: Sequence[int],
        backend: str,
        begun: float,
        max_spent_s: float = math.inf,
    ) -> None:
        """`order` [num_tests] holds the test of each position. `begun` is the time.monotonic() of the submission's
        arrival. Once the tests have used `max_spent_s` seconds of wall time together, no further test counts.
        """
        self.judge = judge
        self._submission = submission
        self._backend = backend
        self._begun = begun
        self._max_spent_s = max_spent_s
        self._order = order
        self._position = {index: position for position, index in enumerate(order)}
        self._next = 0  # the first position that has never been taken
        self._given_back: list[int] = []  # a heap of positions
        self._taken: set[int] = set()
        self._ahead: dict[int, _Judged] = {}  # by position: recorded, but an earlier position is not
        self._final: list[TestOutcome] = []  # by position
        self._end = len(order)  # positions from here on do not count
        self._spent_s = 0.0
        self._stderr_left = _STDERR_CHARS
        self._out_of_time = False
        self._failure: FirstFailure | None = None
        self._fault = ""
        # LiveCodeBench's grader reports no tests after the first failure.
        self._stops = submission.stop_on_first_failure or submission.profile is Profile.LCB

    @property
    def is_known(self) -> bool:
        """Whether the verdict is known: no remaining test can change it."""
        return len(self._final) == self._end

    @property
    def num_left(self) -> int:
        """The number of tests that can be taken now."""
        return max(0, self._end - self._next) + sum(position < self._end for position in self._given_back)

    def counts(self, index: int) -> bool:
        """Whether the verdict may still depend on this test."""
        return self._position[index] < self._end

    def take(self) -> int | None:
        """Take a test, which must be recorded or returned. None when every test is taken or recorded."""
        if self._given_back and self._given_back[0] < self._end:
            position = heapq.heappop(self._given_back)
        elif self._next < self._end:
            position = self._next
            self._next += 1
        else:
            return None
        self._taken.add(position)
        return self._order[position]

    def give_back(self, index: int) -> None:
        """Return a taken test that could not be run."""
        position = self._taken_position(index)
        self._taken.remove(position)
        heapq.heappush(self._given_back, position)

    async def record(self, index: int, result: RunResult, ruling: Ruling | None = None) -> Sequence[TestOutcome]:
        """Judge the result of a taken test. Large outputs are compared in a thread, to keep the event loop free.

        `ruling` is the decision of a checker, an interactor or the math library; it overrides the comparison. Returns
        the outcomes that have become final, in order.
        """
        position = self._taken_position(index)
        judged = await self._judged(index, result, ruling)
        self._taken.remove(position)
        if position >= self._end:
            return ()
        self._ahead[position] = judged
        if judged.failure is not None and self._stops:
            self._end = position + 1
        return self._finalize()

    def _taken_position(self, index: int) -> int:
        position = self._position[index]
        if position not in self._taken:
            raise ValueError(f"test {index} has not been taken")
        return position

    async def _judged(self, index: int, result: RunResult, ruling: Ruling | None) -> _Judged:
        is_long = takes_long(self._submission.tests, index)
        if ruling is not None:
            kind = ruling.outcome
        elif is_long:
            kind = await in_turn(outcome_of, self.judge, index, result)
        elif max(len(result.stdout), len(result.result or b"")) > SMALL_BYTES:
            kind = await asyncio.to_thread(outcome_of, self.judge, index, result)
        else:
            kind = outcome_of(self.judge, index, result)
        points = None if ruling is None else ruling.points
        stderr = stderr_of(result) if self._submission.stderr else None
        times = (result.wall_time_s, result.cpu_time_s)
        outcome = TestOutcome(index, kind, *times, result.memory_bytes, points, stderr)
        if kind is VerdictKind.ACCEPTED:
            return _Judged(outcome, None, "")
        remark = "" if ruling is None else ruling.remark
        if is_long:
            failure = await in_turn(failure_of, self.judge, index, kind, result, remark)
        else:
            failure = failure_of(self.judge, index, kind, result, remark)
        return _Judged(outcome, failure, remark if kind is VerdictKind.INTERNAL_ERROR else "")

    def _finalize(self) -> Sequence[TestOutcome]:
        """Count the outcomes that have become final, and return them."""
        num_before = len(self._final)
        while not self.is_known and (judged := self._ahead.pop(len(self._final), None)) is not None:
            self._count(judged)
        return self._final[num_before:]

    def _count(self, judged: _Judged) -> None:
        outcome = judged.outcome
        if outcome.stderr is not None:
            outcome = replace(outcome, stderr=outcome.stderr if self._stderr_left > 0 else "")
            self._stderr_left -= len(outcome.stderr or "")
        self._final.append(outcome)
        failure = judged.failure
        if failure is not None and (self._failure is None or failure.index < self._failure.index):
            self._failure, self._fault = failure, judged.fault
        self._spent_s += judged.outcome.wall_time_s
        if self._spent_s > self._max_spent_s and not self.is_known:
            self._out_of_time = True
            self._end = len(self._final)

    def verdict(self) -> Verdict:
        """The verdict, once it is known: the outcome of the failed test with the lowest index, or accepted."""
        if self._out_of_time:
            limit = f"the tests took more than {self._max_spent_s:g} s in total"
            return self.ended(VerdictKind.TIME_LIMIT_EXCEEDED, limit)
        return self.ended(VerdictKind.ACCEPTED if self._failure is None else self._failure.outcome, self._fault)

    def ended(self, kind: VerdictKind, detail: str) -> Verdict:
        """A verdict of this kind with the outcomes that are final so far."""
        outcomes = tuple(sorted(self._final, key=lambda outcome: outcome.index))
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
