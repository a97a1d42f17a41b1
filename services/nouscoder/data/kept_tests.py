"""Which tests of a synthetic problem are kept: those that the best of the solver's programs passes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from nouscoder.client import GradingFailed
from nouscoder.data.asking import NotAnswered, fill
from nouscoder.data.written_problem import NoProblem, SeedRejection, WrittenProblem
from nouscoder.domain.submission import CallCase, CallTests, Prelude, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.grade_files.answers import GradingTarget, answers_of
from nouscoder.grade_files.entries import BadEntry, Entry
from nouscoder.progress_bar import progress_bar
from nouscoder.record_log import RecordLog, key_of
from nouscoder.verifier.api.schema import request_of


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
        raise NoProblem(SeedRejection.NO_PROGRAM, "no answer of the solver has a program")
    distinct = [_distinct(problem.cases, own) for own in passed]
    best = max(range(len(distinct)), key=lambda at: len(distinct[at]))
    if len(distinct[best]) < at_least:
        detail = f"the best of {len(passed)} programs passes {len(distinct[best])} of {len(problem.cases)} tests"
        raise NoProblem(SeedRejection.FEW_TESTS_PASS, detail)
    return KeptTests(CallTests(problem.entry_point, tuple(distinct[best])), best)


def _distinct(cases: Sequence[CallCase], places: Set[int]) -> list[CallCase]:
    """The cases at these places, one for each list of arguments."""
    found: dict[str, CallCase] = {}
    for place in sorted(places):
        case = asdict(cases[place])
        found.setdefault(json.dumps([case["args"], case["kwargs"]]), cases[place])
    return list(found.values())


def result_key(submission: Submission) -> str:
    """The key of a program's result: a digest of its code, the tests and the rules."""
    return key_of(request_of(submission))


def grade_programs(submissions: Sequence[Submission], verifier: GradingTarget, results: RecordLog) -> None:
    """Grade the programs without a result, which is the tests that each passes. Raises NotAnswered."""
    missing = {result_key(one): one for one in submissions if result_key(one) not in results}
    if missing:
        failures = asyncio.run(_grade_all(missing, verifier, results))
        if failures:
            raise NotAnswered(
                f"{len(failures)} programs got no verdict ({failures[0]:.200}); the other results are kept: start again"
            )


async def _grade_all(missing: dict[str, Submission], verifier: GradingTarget, results: RecordLog) -> list[str]:
    failures: list[str] = []

    async def result(submission: Submission) -> dict[str, Any] | None:
        """The record of a program's result; None after a failure. A program that cannot be graded passes no test."""
        try:
            verdict = await answer(Entry(0, "", request=request_of(submission)))
        except (BadEntry, GradingFailed) as error:
            if isinstance(error, BadEntry) or error.status == 422:
                return {"verdict": f"refused: {error}", "passed": []}
            failures.append(str(error))
            return None
        if verdict["verdict"] == VerdictKind.INTERNAL_ERROR.value:
            failures.append(f"internal_error: {verdict['detail']}")
            return None
        accepted = VerdictKind.ACCEPTED.value
        passed = [test["index"] for test in verdict["tests"] if test["outcome"] == accepted]
        return {"verdict": verdict["verdict"], "passed": passed}

    async with answers_of(verifier, None) as (answer, at_once):
        with progress_bar("running programs", len(missing)) as advance:
            await fill(results, missing.items(), at_once, result, advance)
    return failures
