"""The order in which the tests of a submission run.

A wrong program fails most often on its hardest test, so running that test first ends grading early. The hardest test is
the one that has failed the largest share of programs so far: `KillRates` learns these shares while it grades, and keeps
them in memory. Where no rates are known, it is the one with the longest input. Outcomes keep the indices of the
request.

INVARIANT: at most `max_problems` tables are kept, and the least recently used one is evicted first. A table has at most
`max_tests` tests. It belongs to one client, one problem id and one set of tests. It holds counts only, and nothing of
any program. A test that has never run has the prior's rate.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from cachetools import LRUCache

from nouscoder.domain.submission import Submission, TestsReference
from nouscoder.domain.verdict import TestOutcome, VerdictKind
from nouscoder.formats.tests import digest_of
from nouscoder.verifier.judges.judge import Judge

PRIOR_KILLS = 1
PRIOR_RUNS = 4
_MAX_RUNS = 256  # at this count both counts of a test are halved, so that recent programs weigh more


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
