"""The results of grading: the outcome of one test, and the verdict of a submission.

Failures of a candidate and of the infrastructure are separate: `INTERNAL_ERROR` is a failure of the infrastructure. It
is retried in another place and never becomes a reward: asking for one (domain/reward.py) raises ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class VerdictKind(StrEnum):
    """All verdicts and outcomes. Outcomes have all values except NO_CODE and COMPILE_ERROR."""

    ACCEPTED = "accepted"
    WRONG_ANSWER = "wrong_answer"
    TIME_LIMIT_EXCEEDED = "time_limit_exceeded"
    MEMORY_LIMIT_EXCEEDED = "memory_limit_exceeded"
    OUTPUT_LIMIT_EXCEEDED = "output_limit_exceeded"
    RUNTIME_ERROR = "runtime_error"
    COMPILE_ERROR = "compile_error"
    NO_CODE = "no_code"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """The outcome of one test. `index` is its position in the request, in whatever order the tests ran.

    `points` is the share of a test that is partly right, from 0 to below 1, if its judge program gave one. `stderr` is
    the end of what the program wrote there, if the submission asks for it.
    """

    __test__ = False  # not a pytest class

    index: int
    outcome: VerdictKind
    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int
    points: float | None = None
    stderr: str | None = None

    @property
    def score(self) -> float:
        """1 for an accepted test, its points for one that is partly right, else 0."""
        return 1.0 if self.outcome is VerdictKind.ACCEPTED else self.points or 0.0


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The failed test with the lowest index among those run. Its texts are clipped."""

    index: int
    outcome: VerdictKind
    input: str = ""
    expected: str = ""
    output: str = ""
    stderr: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of one submission: `passed` of `total` tests passed, and `graded` tests were run."""

    kind: VerdictKind
    passed: int
    total: int
    graded: int
    duration_s: float
    backend: str
    cached: bool = False
    tests: tuple[TestOutcome, ...] = ()
    first_failure: FirstFailure | None = None
    detail: str = ""

    @property
    def score(self) -> float:
        """The mean score of all tests, from 0 to 1. A test that did not run has 0."""
        points = sum(outcome.points or 0.0 for outcome in self.tests)
        return (self.passed + points) / self.total if self.total else 0.0

    @property
    def is_ours(self) -> bool:
        """Whether the infrastructure failed, so that the candidate was not judged."""
        return self.kind is VerdictKind.INTERNAL_ERROR
