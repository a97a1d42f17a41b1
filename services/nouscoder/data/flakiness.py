"""Finds flaws in a problem's tests from the results of its reference solutions in several rounds. Pure.

A reference is assumed to be right. If it fails a test, or passes only sometimes, the test or the reference is wrong. In
both cases rewards would depend on chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.verdict import VerdictKind

NEAR_LIMIT = 0.5


class Flaw(StrEnum):
    """The kinds of flaws of a test or of a whole problem."""

    OUTCOME_VARIES = "outcome_varies"
    OUTPUT_VARIES = "output_varies"
    NEVER_PASSED = "never_passed"
    NEAR_LIMIT = "near_limit"  # a reference uses more than the share NEAR_LIMIT of the time limit
    NOT_RUN = "not_run"  # a reference does not compile, or cannot be graded


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one reference in one test in one round. `output` is a digest; empty if none is recorded."""

    outcome: VerdictKind
    output: bytes
    share_of_limit: float  # the larger of the shares of the CPU and the wall time limit


@dataclass(frozen=True, slots=True)
class Round:
    """The results of one reference in all tests [num_tests]. When it could not run, `trouble` says why."""

    reference: int
    tests: tuple[Seen, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One flaw. `test` is None for a flaw of the whole problem."""

    problem_id: str
    test: int | None
    flaw: Flaw
    detail: str


def findings_of(problem_id: str, rounds: Sequence[Round]) -> list[Finding]:
    """All flaws of one problem: those of the whole problem, then those of each test."""
    troubles = Counter(f"reference {one.reference}: {one.trouble}" for one in rounds if one.trouble)
    found = [
        Finding(problem_id, None, Flaw.NOT_RUN, f"{text} ({count} times)") for text, count in sorted(troubles.items())
    ]
    whole = [one for one in rounds if not one.trouble]
    for test in range(len(whole[0].tests) if whole else 0):
        seen = [(one.reference, one.tests[test]) for one in whole]
        found += (Finding(problem_id, test, flaw, detail) for flaw, detail in _flaws(seen))
    return found


def _flaws(seen: Sequence[tuple[int, Seen]]) -> list[tuple[Flaw, str]]:
    flaws = []
    for reference in sorted({number for number, _ in seen}):
        own = [one for number, one in seen if number == reference]
        outcomes = Counter(one.outcome.value for one in own)
        if len(outcomes) > 1:
            counts = ", ".join(f"{outcome} {count} times" for outcome, count in outcomes.most_common())
            flaws.append((Flaw.OUTCOME_VARIES, f"reference {reference}: {counts}"))
        outputs = {one.output for one in own}
        if len(outputs) > 1:
            flaws.append((Flaw.OUTPUT_VARIES, f"reference {reference}: {len(outputs)} outputs in {len(own)} rounds"))
        slowest = max(one.share_of_limit for one in own)
        passed = VerdictKind.ACCEPTED.value in outcomes
        if passed and slowest > NEAR_LIMIT:
            flaws.append((Flaw.NEAR_LIMIT, f"reference {reference} took {slowest:.0%} of the limit"))
    if not any(one.outcome is VerdictKind.ACCEPTED for _, one in seen):
        got = ", ".join(sorted({one.outcome.value for _, one in seen}))
        flaws.append((Flaw.NEVER_PASSED, f"{len(seen)} runs of references got {got}"))
    return flaws
