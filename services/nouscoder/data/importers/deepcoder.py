"""DeepCoder-Preview-Dataset (agentica-org), parquet: problem, solutions and tests, whose form depends on the part.

primeintellect: a list of {type, fn_name, input, output}; taco: {inputs, outputs, fn_name}; lcbv5 and codeforces: a list
of {input, output, testtype, metadata: {func_name}}. `tests` is a string of JSON.
"""

from __future__ import annotations

from typing import Any

from nouscoder.data.importers import livecodebench, synthetic1, taco_apps
from nouscoder.data.importers.fields import Row, decoded, optional_text, references, text, with_starter_code
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallTests, Prelude, StdinTests


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    problem = Problem(
        problem_id=f"deepcoder-{number}",
        prompt=with_starter_code(text(row, "problem"), optional_text(row, "starter_code")),
        tests=_tests(decoded(row.get("tests") or "[]"), decoded(row.get("metadata") or "{}")),
        prelude=Prelude.LCB,
        difficulty=optional_text(row, "difficulty"),
        source="deepcoder",
    )
    return ReferencedProblem(problem, references(row.get("solutions")))


def _tests(value: Any, metadata: Any) -> StdinTests | CallTests:
    if isinstance(value, dict):
        return taco_apps.tests_of(value)
    if not isinstance(value, list) or not value:
        raise Rejected(Reason.NO_TESTS, "there is no test")
    if "testtype" not in value[0]:
        return synthetic1.case_tests(value)
    return livecodebench.tests_of(value, metadata or value[0].get("metadata") or {})
