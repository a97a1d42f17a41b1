"""Which tests fail the programs that are sent for a problem: learned while grading, kept in memory.

INVARIANT: at most `max_problems` tables are kept, the least recently used go first, each of at most `max_tests` tests;
a table is of one client, one problem id and one set of inputs, and holds counts alone: nothing of any program. A test
that nobody has run has the prior's rate.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from nouscoder.domain.submission import AssertTests, Submission
from nouscoder.domain.verdict import TestOutcome, VerdictKind
from nouscoder.verifier.judges.base import Judge, encoded

PRIOR_KILLS = 1
PRIOR_RUNS = 4
_REMEMBERED_RUNS = 256  # of a test; then its counts are halved, so that what a policy fails at now weighs more
_SEEN_BYTES = 64


class KillTable:
    """How often each test was run, and how often it failed the program."""

    def __init__(self, num_tests: int) -> None:
        self._runs = array("H", bytes(2 * num_tests))
        self._kills = array("H", bytes(2 * num_tests))

    def rates(self) -> list[float]:
        """The share of failed runs of each test [num_tests], drawn towards the prior's where there were few."""
        counts = zip(self._kills, self._runs, strict=True)
        return [(kills + PRIOR_KILLS) / (runs + PRIOR_RUNS) for kills, runs in counts]

    def learn(self, outcomes: Iterable[TestOutcome]) -> None:
        """Count what a program's tests got; failures of ours say nothing of a test."""
        for outcome in outcomes:
            if outcome.outcome is VerdictKind.INTERNAL_ERROR:
                continue
            index = outcome.index
            self._runs[index] += 1
            self._kills[index] += outcome.outcome is not VerdictKind.ACCEPTED
            if self._runs[index] >= _REMEMBERED_RUNS:
                self._runs[index] //= 2
                self._kills[index] //= 2


class KillRates:
    """The tables of one service."""

    def __init__(self, max_problems: int = 4096, max_tests: int = 1000) -> None:
        self._max_problems = max_problems
        self._max_tests = max_tests
        self._tables: OrderedDict[tuple[str, bytes], KillTable] = OrderedDict()

    def table(self, client: str, submission: Submission, judge: Judge) -> KillTable | None:
        """The table of this submission's tests; None when it names no problem or has too many tests to learn of."""
        if not submission.problem_id or judge.num_tests > self._max_tests:
            return None
        key = (client, _digest(submission, judge))
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = KillTable(judge.num_tests)
            if len(self._tables) > self._max_problems:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return table


def _digest(submission: Submission, judge: Judge) -> bytes:
    """Of the problem id and of the length, the beginning and the end of every input.

    What has the same digest and is not the same costs time, never a right verdict.
    """
    digest = hashlib.blake2b(encoded(submission.problem_id), digest_size=16)
    for index in range(judge.num_tests):
        given = _given(submission, judge, index)
        digest.update(b"%d:" % len(given) + given[:_SEEN_BYTES] + given[-_SEEN_BYTES:])
    return digest.digest()


def _given(submission: Submission, judge: Judge, index: int) -> bytes:
    if isinstance(submission.tests, AssertTests):  # what their process is given differs each time
        return encoded(submission.tests.cases[index])
    return judge.stdin(index)
