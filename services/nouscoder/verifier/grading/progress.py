"""How far one submission is: which tests are left, what the others got, and the verdict that follows.

Tests have positions: 0 is the one to run first (order.py). They are handed out in that order to any number of takers
and recorded in any order.

INVARIANT: outcomes and verdict are those of one taker who runs the positions one after the other, whatever the order in
which tests are recorded: an outcome counts, and is told, once all positions before it are known, and none counts after
the one that ends grading (the first failure where that stops it, or the moment when the tests so far have had all their
time). A test is in one hand at most and recorded once at most; one that is given back is handed out again first.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nouscoder.domain.submission import Profile, Submission
from nouscoder.domain.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.grading.judging import failure_of, outcome_of
from nouscoder.verifier.judges.base import Judge
from nouscoder.verifier.judges.partners import Ruling
from nouscoder.verifier.sandbox.base import RunResult

_LARGE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class _Judged:
    """A test's outcome; `failure` is None when it passed; `fault` says what of ours is to blame, if anything is."""

    outcome: TestOutcome
    failure: FirstFailure | None
    fault: str


class Progress:
    """The state of grading one submission. It survives a failed sandbox: tests already judged are not run again."""

    def __init__(
        self,
        submission: Submission,
        judge: Judge,
        order: Sequence[int],
        backend: str,
        begun: float,
        max_spent_s: float = math.inf,
    ) -> None:
        """`order` [num_tests] has the test of each position; `begun` is the time.monotonic() of the submission's
        arrival; after `max_spent_s` seconds of wall time in tests no further one counts.
        """
        self.judge = judge
        self._submission = submission
        self._backend = backend
        self._begun = begun
        self._max_spent_s = max_spent_s
        self._order = order
        self._position = {index: position for position, index in enumerate(order)}
        self._next = 0  # no position from here on has been handed out
        self._given_back: list[int] = []  # a heap of positions
        self._in_hand: set[int] = set()
        self._ahead: dict[int, _Judged] = {}  # by position: recorded, but one before it is not
        self._told: list[TestOutcome] = []  # by position
        self._end = len(order)  # no position from here on counts
        self._spent_s = 0.0
        self._out_of_time = False
        self._failure: FirstFailure | None = None
        self._fault = ""
        # LiveCodeBench's grader knows nothing of the tests after the first failure.
        self._stops = submission.stop_on_first_failure or submission.profile is Profile.LCB

    @property
    def is_known(self) -> bool:
        """Whether no test is left that the verdict depends on."""
        return len(self._told) == self._end

    @property
    def num_left(self) -> int:
        """Tests that can be taken now."""
        return max(0, self._end - self._next) + sum(position < self._end for position in self._given_back)

    def counts(self, index: int) -> bool:
        """Whether the verdict may still depend on this test."""
        return self._position[index] < self._end

    def take(self) -> int | None:
        """A test to run, to be recorded or given back; None while there is none that nobody has."""
        if self._given_back and self._given_back[0] < self._end:
            position = heapq.heappop(self._given_back)
        elif self._next < self._end:
            position = self._next
            self._next += 1
        else:
            return None
        self._in_hand.add(position)
        return self._order[position]

    def give_back(self, index: int) -> None:
        """What was taken could not be run."""
        position = self._hold(index)
        self._in_hand.remove(position)
        heapq.heappush(self._given_back, position)

    async def record(self, index: int, result: RunResult, ruling: Ruling | None = None) -> Sequence[TestOutcome]:
        """Judge what the process of a taken test did; large outputs in a thread, to keep the service answering.

        `ruling` is what a checker, an interactor or a library has said of it, and counts if there is one. Returns the
        outcomes that are certain from now on, in order.
        """
        position = self._hold(index)
        judged = await self._judged(index, result, ruling)
        self._in_hand.remove(position)
        if position >= self._end:
            return ()
        self._ahead[position] = judged
        if judged.failure is not None and self._stops:
            self._end = position + 1
        return self._tell()

    def _hold(self, index: int) -> int:
        position = self._position[index]
        if position not in self._in_hand:
            raise ValueError(f"test {index} is in nobody's hand")
        return position

    async def _judged(self, index: int, result: RunResult, ruling: Ruling | None) -> _Judged:
        if ruling is not None:
            kind = ruling.outcome
        elif len(result.stdout) > _LARGE_BYTES or len(result.result or b"") > _LARGE_BYTES:
            kind = await asyncio.to_thread(outcome_of, self.judge, index, result)
        else:
            kind = outcome_of(self.judge, index, result)
        outcome = TestOutcome(index, kind, result.wall_time_s, result.cpu_time_s, result.memory_bytes)
        if kind is VerdictKind.ACCEPTED:
            return _Judged(outcome, None, "")
        remark = "" if ruling is None else ruling.remark
        failure = failure_of(self.judge, index, kind, result, remark)
        return _Judged(outcome, failure, remark if kind is VerdictKind.INTERNAL_ERROR else "")

    def _tell(self) -> Sequence[TestOutcome]:
        """Count what has become certain."""
        known_before = len(self._told)
        while not self.is_known and (judged := self._ahead.pop(len(self._told), None)) is not None:
            self._count(judged)
        return self._told[known_before:]

    def _count(self, judged: _Judged) -> None:
        self._told.append(judged.outcome)
        failure = judged.failure
        if failure is not None and (self._failure is None or failure.index < self._failure.index):
            self._failure, self._fault = failure, judged.fault
        self._spent_s += judged.outcome.wall_time_s
        if self._spent_s > self._max_spent_s and not self.is_known:
            self._out_of_time = True
            self._end = len(self._told)

    def verdict(self) -> Verdict:
        """The verdict once it is known: that of the first failure, if there is one."""
        if self._out_of_time:
            limit = f"its tests together took more than {self._max_spent_s:g} s"
            return self.ended(VerdictKind.TIME_LIMIT_EXCEEDED, limit)
        return self.ended(VerdictKind.ACCEPTED if self._failure is None else self._failure.outcome, self._fault)

    def ended(self, kind: VerdictKind, detail: str) -> Verdict:
        """A verdict of this kind over the outcomes that are certain so far."""
        outcomes = tuple(sorted(self._told, key=lambda outcome: outcome.index))
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
