"""HumanEval, HumanEval+, MBPP and MBPP+, as openai_humaneval, mbpp and evalplus publish them.

HumanEval: task_id, prompt, canonical_solution, test (`def check(candidate)`), entry_point. MBPP: task_id, text or
prompt, code, test_list, test_imports, test_setup_code; MBPP+ has `test` too, a program. Tests whose arguments and
results are literals become call tests (also of the plus sets: evalplus.py), so that a program never sees the results.
Others stay asserts.
"""

from __future__ import annotations

import ast

from nouscoder.data.importers.acecode import checked
from nouscoder.data.importers.evalplus import plus_tests
from nouscoder.data.importers.fields import Row, decoded, optional_text, text
from nouscoder.data.importers.leetcode import call_case
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import AssertTests, CallTests, Comparator

# As EvalPlus compares floats.
_FLOATS = Comparator(absolute_tolerance=1e-6, relative_tolerance=1e-7)


def read_humaneval(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The prompt is the beginning of the function, as published."""
    entry_point, code = text(row, "entry_point"), text(row, "test")
    tests, comparator = _humaneval_tests(code, entry_point)
    problem = Problem(
        problem_id=text(row, "task_id"),
        prompt=text(row, "prompt"),
        tests=tests,
        comparator=comparator,
        source="humaneval",
    )
    solution = optional_text(row, "canonical_solution")
    return ReferencedProblem(problem, (Reference(problem.prompt + solution),) if solution else ())


def read_mbpp(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The prompt has the first test, which tells the function's name, as published."""
    task_id = optional_text(row, "task_id")
    listed = decoded(row.get("test_list") or [])
    if not task_id or not isinstance(listed, list) or not listed:
        raise Rejected(Reason.NO_TESTS, "task_id or test_list is missing")
    imports = "\n".join(decoded(row.get("test_imports") or []) or [])
    setup = "\n".join(part for part in (imports, optional_text(row, "test_setup_code")) if part)
    tests, comparator = _mbpp_tests(optional_text(row, "test"), listed, setup)
    problem = Problem(
        problem_id=f"Mbpp/{task_id}",
        prompt=f"{text(row, 'prompt', 'text')}\n\nYour code must pass this test:\n{listed[0]}",
        tests=tests,
        comparator=comparator,
        source="mbpp",
    )
    solution = optional_text(row, "code")
    return ReferencedProblem(problem, (Reference(solution),) if solution else ())


def _humaneval_tests(code: str, entry_point: str) -> tuple[CallTests | AssertTests, Comparator]:
    module = _parsed(code)
    if plus := plus_tests(module, entry_point):
        return plus.tests, plus.comparator
    check = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    try:
        if check is not None:
            cases = tuple(call_case(statement, "candidate") for statement in check.body)
            return CallTests(entry_point, cases), _FLOATS
    except Rejected:
        pass  # a statement of another form
    return AssertTests((f"{code}\ncheck({entry_point})",)), Comparator()


def _mbpp_tests(code: str, listed: list[object], setup: str) -> tuple[CallTests | AssertTests, Comparator]:
    """`code` is the program of MBPP+, empty for MBPP."""
    if not code:
        return AssertTests(tuple(checked(case) for case in listed), setup), Comparator()
    if plus := plus_tests(_parsed(code), None):
        return plus.tests, plus.comparator
    return AssertTests((code,), setup), Comparator()


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"the tests are not python: {error}") from None
