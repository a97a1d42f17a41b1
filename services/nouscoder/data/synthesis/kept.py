"""Which tests of a written problem are kept: those that a solver's program passes."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass

from nouscoder.data.synthesis.written import NoProblem, Rejection, WrittenProblem
from nouscoder.domain.submission import CallCase, CallTests, Prelude, Submission


@dataclass(frozen=True, slots=True)
class KeptTests:
    """The tests that are kept, and the place of the program that passes them all: the problem's reference."""

    tests: CallTests
    program: int


def submission_of(problem: WrittenProblem, code: str) -> Submission:
    """A solver's program with all tests that were written, each of which is run."""
    tests = CallTests(problem.entry_point, problem.cases)
    return Submission(tests=tests, code=code, stop_on_first_failure=False, reveal=False, prelude=Prelude.LCB)


def kept_tests(problem: WrittenProblem, passed: Sequence[Set[int]], at_least: int) -> KeptTests:
    """The tests that the best program passes. `passed`: for each program the places of the tests that it passes.

    The best program passes most tests; the first of equal ones counts. So all kept tests agree with one program, and
    two tests with the same arguments are one. Raises NoProblem when fewer than `at_least` are kept.
    """
    if not passed:
        raise NoProblem(Rejection.NO_PROGRAM, "no answer of the solver has a program")
    distinct = [_distinct(problem.cases, own) for own in passed]
    best = max(range(len(distinct)), key=lambda at: len(distinct[at]))
    if len(distinct[best]) < at_least:
        detail = f"the best of {len(passed)} programs passes {len(distinct[best])} of {len(problem.cases)} tests"
        raise NoProblem(Rejection.FEW_TESTS_PASS, detail)
    return KeptTests(CallTests(problem.entry_point, tuple(distinct[best])), best)


def _distinct(cases: Sequence[CallCase], places: Set[int]) -> list[CallCase]:
    """The cases at these places, one for each list of arguments."""
    found: dict[str, CallCase] = {}
    for place in sorted(places):
        case = asdict(cases[place])
        found.setdefault(json.dumps([case["args"], case["kwargs"]]), cases[place])
    return list(found.values())
