"""The order of a submission's tests, and its progress: the tests that are left, the outcomes so far, and the verdict.

A wrong program fails most often on its hardest test, so running that test first ends grading early. The hardest test is
the one that has failed the largest share of programs so far: `KillRates` learns these shares while it grades, and keeps
them in memory. Where no rates are known, it is the one with the longest input. Outcomes keep the indices of the
request.

Each test has a position; position 0 runs first. Test workers take tests in that order and record them in any order.

INVARIANT: outcomes and verdict equal those of one worker that runs the positions in sequence, whatever the order in
which tests are recorded. An outcome becomes final, and is reported, once all earlier positions are final. No outcome
counts after the one that ends grading: the first failure of a submission that stops there, or the outcome with which
the submission exceeds its total time. At most one worker has a test at a time, and a test is recorded at most once. A
returned test is handed out again before all others.

Of the kill rates at most `max_problems` tables are kept, and the least recently used one is evicted first. A table has
at most `max_tests` tests. It belongs to one client, one problem id and one set of tests. It holds counts only, and
nothing of any program. A test that has never run has the prior's rate.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cachetools import LRUCache

from nouscoder.domain.submission import ComparatorKind, Submission, TestsReference
from nouscoder.domain.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind
from nouscoder.formats.body import digest_of
from nouscoder.verifier.judges import users_comparators
from nouscoder.verifier.judges.comparators import SMALL_BYTES
from nouscoder.verifier.judges.judge import Judge, failure_of, in_turn, outcome_of, stderr_of, takes_long
from nouscoder.verifier.judges.rulings import Ruling
from nouscoder.verifier.sandbox.base import RunResult

_STDERR_CHARS = 1_000_000  # of all tests of a submission together; later tests have none
PRIOR_KILLS = 1
PRIOR_RUNS = 4
_MAX_RUNS = 256  # at this count both counts of a test are halved, so that recent programs weigh more


@dataclass(frozen=True, slots=True)
class _Judged:
    """The outcome of a test. `failure` is None when it passed. `fault` names an infrastructure failure, or is "".

    `spent_s` is the time that counts against the submission's total.
    """

    outcome: TestOutcome
    failure: FirstFailure | None
    fault: str
    spent_s: float


class SubmissionProgress:
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
        arrival. Once the tests have used their slot for `max_spent_s` seconds together, no further test counts.
        """
        self.judge = judge
        self._submission = submission
        self._is_users = submission.comparator.kind is ComparatorKind.ENTRY_POINT
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
        self._stops = submission.stop_on_first_failure or submission.profile.is_lcb

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

    async def record(
        self, index: int, result: RunResult, ruling: Ruling | None = None, spent_s: float = 0.0
    ) -> Sequence[TestOutcome]:
        """Judge the result of a taken test. Large outputs are compared in a thread, to keep the event loop free.

        `ruling` is the decision of a checker, an interactor or the math library; it overrides the comparison. `spent_s`
        is how long the test has used its slot, with its checker and all that is cleaned up after it; the time in which
        others kept the program from the CPU does not count. Returns the
        outcomes that have become final, in order.
        """
        position = self._taken_position(index)
        judged = await self._judged(index, result, ruling, max(spent_s - result.starved_s, result.wall_time_s))
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

    async def _judged(self, index: int, result: RunResult, ruling: Ruling | None, spent_s: float) -> _Judged:
        is_long = takes_long(self._submission.tests, index)
        if ruling is not None:
            kind = ruling.outcome
        elif self._is_users:
            loop = asyncio.get_running_loop()
            kind = await loop.run_in_executor(users_comparators.threads, outcome_of, self.judge, index, result)
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
            return _Judged(outcome, None, "", spent_s)
        remark = "" if ruling is None else ruling.remark
        if is_long:
            failure = await in_turn(failure_of, self.judge, index, kind, result, remark)
        else:
            failure = failure_of(self.judge, index, kind, result, remark)
        return _Judged(outcome, failure, remark if kind is VerdictKind.INTERNAL_ERROR else "", spent_s)

    def _finalize(self) -> Sequence[TestOutcome]:
        """Count the outcomes that have become final, and return them."""
        num_before = len(self._final)
        while not self.is_known and (judged := self._ahead.pop(len(self._final), None)) is not None:
            outcome = judged.outcome
            if outcome.stderr is not None:
                outcome = replace(outcome, stderr=outcome.stderr if self._stderr_left > 0 else "")
                self._stderr_left -= len(outcome.stderr or "")
            self._final.append(outcome)
            failure = judged.failure
            if failure is not None and (self._failure is None or failure.index < self._failure.index):
                self._failure, self._fault = failure, judged.fault
            self._spent_s += judged.spent_s
            if self._spent_s > self._max_spent_s and not self.is_known:
                self._out_of_time = True
                self._end = len(self._final)
        return self._final[num_before:]

    def verdict(self) -> Verdict:
        """The verdict, once it is known: the outcome of the failed test with the lowest index, or accepted.

        A program is not blamed for the time of judges that are at fault.
        """
        if self._out_of_time and not self._fault:
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


def hardest_first(input_sizes: Sequence[int], kill_rates: Sequence[float] | None = None) -> list[int]:
    """Test indices [num_tests]: highest kill rate first, then longest input, then the order of the request."""
    rates = kill_rates if kill_rates is not None else [0.0] * len(input_sizes)
    return sorted(range(len(input_sizes)), key=lambda index: (-rates[index], -input_sizes[index]))


class KillTable:
    """For each test, the number of runs and the number of failed runs."""

    def __init__(self, num_tests: int) -> None:
        self._runs = array("H", bytes(2 * num_tests))
        self._kills = array("H", bytes(2 * num_tests))

    def rates(self) -> list[float]:
        """The share of failed runs of each test [num_tests], smoothed by the prior."""
        counts = zip(self._kills, self._runs, strict=True)
        return [(kills + PRIOR_KILLS) / (runs + PRIOR_RUNS) for kills, runs in counts]

    def learn(self, outcomes: Iterable[TestOutcome]) -> None:
        """Count the outcomes of one program. Infrastructure failures do not count."""
        for outcome in outcomes:
            if outcome.outcome is VerdictKind.INTERNAL_ERROR:
                continue
            index = outcome.index
            self._runs[index] += 1
            self._kills[index] += outcome.outcome is not VerdictKind.ACCEPTED
            if self._runs[index] >= _MAX_RUNS:
                self._runs[index] //= 2
                self._kills[index] //= 2


class KillRates:
    """The tables of one service."""

    def __init__(self, max_problems: int = 4096, max_tests: int = 1000) -> None:
        self._max_tests = max_tests
        self._tables: LRUCache[tuple[str, str, str], KillTable] = LRUCache(max_problems)

    def table(self, client: str, submission: Submission, judge: Judge) -> KillTable | None:
        """The table of this submission's tests. None when it names no problem or has more than `max_tests` tests."""
        tests = submission.tests
        if not submission.problem_id or judge.num_tests > self._max_tests or isinstance(tests, TestsReference):
            return None
        key = (client, submission.problem_id, submission.tests_digest or digest_of(tests))
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = KillTable(judge.num_tests)
        return table
