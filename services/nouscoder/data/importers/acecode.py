"""AceCode-87K (TIGER-Lab/AceCode-87K): a question and `test_cases`, a list of asserts written by a model.

A row has id, source, question, test_cases, inferences ([{model_name, completions, pass_rate}]) and context_messages.
"""

from __future__ import annotations

import ast

from nouscoder.data.importers.fields import Row, decoded, optional_text, text
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import AssertTests, Prelude


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    cases = decoded(row.get("test_cases") or [])
    if not isinstance(cases, list) or not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test case")
    problem = Problem(
        problem_id=optional_text(row, "id") or f"acecode-{number}",
        prompt=text(row, "question"),
        tests=AssertTests(tuple(checked(case) for case in cases)),
        prelude=Prelude.LCB,
        source="acecode",
        family=optional_text(row, "source"),
    )
    return ReferencedProblem(problem)


def checked(case: object) -> str:
    """A case that is python. Raises Rejected."""
    try:
        ast.parse(case if isinstance(case, str) else "")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"a test case is not python: {error}") from None
    if not isinstance(case, str):
        raise Rejected(Reason.UNREADABLE_TESTS, "a test case is not text")
    return case
