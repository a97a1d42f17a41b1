"""TACO (BAAI/TACO) and APPS (codeparrot/apps): a question and `input_output`, a JSON string.

`input_output` has inputs, outputs and, for problems about a function, fn_name. An input or output is text or a list of
lines; for a function an input is the list of its arguments. APPS wraps each result of a function in a list of one; it
is unwrapped when all results of the problem are wrapped.
"""

from __future__ import annotations

from typing import Any

from nouscoder.data.importers.fields import (
    Row,
    call_tests,
    decoded,
    optional_text,
    pairs,
    references,
    stdin_tests,
    text,
    with_starter_code,
)
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallTests, Prelude, StdinTests

_FACTS = ("url", "source", "name", "date", "time_limit", "memory_limit")


def read_taco(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row of TACO, named by its place."""
    return _problem(row, "taco", f"taco-{number}")


def read_apps(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row of APPS, named by its problem_id."""
    return _problem(row, "apps", f"apps-{optional_text(row, 'problem_id', 'id') or number}")


def _problem(row: Row, source: str, problem_id: str) -> ReferencedProblem:
    problem = Problem(
        problem_id=problem_id,
        prompt=with_starter_code(text(row, "question"), optional_text(row, "starter_code")),
        tests=tests_of(decoded(row.get("input_output") or "{}")),
        prelude=Prelude.LCB,
        difficulty=optional_text(row, "difficulty").lower(),
        source=source,
        family=optional_text(row, "source"),
    )
    facts = {name: optional_text(row, name) for name in _FACTS}
    metadata = {name: value for name, value in facts.items() if value}
    return ReferencedProblem(problem, references(row.get("solutions")), metadata)


def tests_of(value: Any) -> StdinTests | CallTests:
    """Tests from {inputs, outputs, fn_name}."""
    if not isinstance(value, dict) or not value.get("inputs"):
        raise Rejected(Reason.NO_TESTS, "input_output has no inputs")
    found = pairs(value["inputs"], value.get("outputs"))
    if not value.get("fn_name"):
        return stdin_tests(found)
    if all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in found):
        found = [(given, wanted[0]) for given, wanted in found]
    return call_tests(str(value["fn_name"]), found)
