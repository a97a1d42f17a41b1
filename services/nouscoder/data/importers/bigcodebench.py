"""BigCodeBench (bigcode/bigcodebench): a task that needs libraries, with `test`, a unittest.TestCase.

A row has task_id, complete_prompt, instruct_prompt, canonical_solution, code_prompt, test, entry_point and libs. Each
test method becomes a case. The candidates' libraries must be installed (verifier.sandbox.site_packages).
"""

from __future__ import annotations

import ast

from nouscoder.data.importers.fields import Row, optional_text, text
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import AssertTests

_RUN = """
import unittest as _unittest
_found = _unittest.TestResult()
_unittest.TestSuite([{case}({method!r})]).run(_found)
assert _found.wasSuccessful(), "".join(text for _, text in _found.failures + _found.errors)
"""


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row, with the instruct prompt where there is one."""
    code = text(row, "test")
    cases = tuple(code + _RUN.format(case=case, method=method) for case, method in _methods(code))
    if not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test method")
    problem = Problem(
        problem_id=text(row, "task_id"),
        prompt=text(row, "instruct_prompt", "complete_prompt"),
        tests=AssertTests(cases),
        source="bigcodebench",
    )
    solution = optional_text(row, "canonical_solution")
    begin = optional_text(row, "code_prompt", "complete_prompt")
    libraries = optional_text(row, "libs")
    return ReferencedProblem(
        problem, (Reference(begin + solution),) if solution else (), {"libraries": libraries} if libraries else {}
    )


def _methods(code: str) -> list[tuple[str, str]]:
    """(class, method) of each test method."""
    try:
        module = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"the tests are not python: {error}") from None
    return [
        (node.name, method.name)
        for node in module.body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith("test")
    ]
