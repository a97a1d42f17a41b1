"""What one process run did (outcome) and what a submission got (verdict): the closed vocabulary of grading.

A candidate's failure and ours never mix: `INTERNAL_ERROR` is infrastructure, is retried elsewhere, and never
becomes a reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class VerdictKind(StrEnum):
    """Every verdict and outcome there is. Outcomes use all values but NO_CODE and COMPILE_ERROR."""

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
    """What one test's process did, judged. `index` is the position in the request, whatever order tests ran in."""

    __test__ = False  # not a pytest class

    index: int
    outcome: VerdictKind
    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The failing test with the lowest index among those run; texts are clipped before they leave the service."""

    index: int
    outcome: VerdictKind
    input: str = ""
    expected: str = ""
    output: str = ""
    stderr: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one submission. `passed` of `total` tests; `graded` tests were really run."""

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
    def is_ours(self) -> bool:
        """True when the infrastructure failed, so nothing is known of the candidate."""
        return self.kind is VerdictKind.INTERNAL_ERROR
