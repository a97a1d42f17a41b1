"""HumanEval, HumanEval+, MBPP and MBPP+, as openai_humaneval, mbpp and evalplus publish them.

HumanEval: task_id, prompt, canonical_solution, test (`def check(candidate)`), entry_point. MBPP: task_id, text or
prompt, code, test_list, test_imports, test_setup_code. The plus sets keep `inputs = [...]` and `results = [...]` as
literals in `test`; these become call tests, so that a program never sees the results. Other tests stay asserts.
"""

from __future__ import annotations

import ast

from nouscoder.data.importers.acecode import checked
from nouscoder.data.importers.fields import Row, call_tests, decoded, optional_text, pairs, text
from nouscoder.data.importers.leetcode import call_case
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import AssertTests, CallTests, Comparator

# EvalPlus compares floats with numpy.allclose(rtol=1e-7, atol=1e-6) when the expected result has one.
_FLOATS = Comparator(absolute_tolerance=1e-6, relative_tolerance=1e-7)


def read_humaneval(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The prompt is the beginning of the function, as published."""
    entry_point, code = text(row, "entry_point"), text(row, "test")
    tests = _call_tests(code, entry_point) or AssertTests((checked(f"{code}\ncheck({entry_point})"),))
    problem = Problem(
        problem_id=text(row, "task_id"),
        prompt=text(row, "prompt"),
        tests=tests,
        comparator=_FLOATS if isinstance(tests, CallTests) else Comparator(),
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
    code = optional_text(row, "test")
    tests = _call_tests(code, None) if code else None
    problem = Problem(
        problem_id=f"Mbpp/{task_id}",
        prompt=f"{text(row, 'prompt', 'text')}\n\nYour code must pass this test:\n{listed[0]}",
        tests=tests or AssertTests(tuple(checked(case) for case in listed), setup),
        comparator=_FLOATS if tests else Comparator(),
        source="mbpp",
    )
    solution = optional_text(row, "code")
    return ReferencedProblem(problem, (Reference(solution),) if solution else ())


def _call_tests(code: str, entry_point: str | None) -> CallTests | None:
    """Call tests from literal `inputs` and `results`, or from asserts on `candidate`; None for tests of another form.

    `entry_point` None is the function that the loop over inputs and results calls.
    """
    try:
        module = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"the tests are not python: {error}") from None
    check = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    body = check.body if check is not None else module.body
    values = {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    try:
        if {"inputs", "results"} <= values.keys():
            found = pairs(ast.literal_eval(values["inputs"]), ast.literal_eval(values["results"]))
            name = entry_point or _called_with_star(body)
            return call_tests(name, found) if name else None
        if entry_point is None or check is None:
            return None
        return CallTests(entry_point, tuple(call_case(statement, "candidate") for statement in body))
    except (ValueError, Rejected):
        return None


def _called_with_star(body: list[ast.stmt]) -> str | None:
    """The function that is called as `name(*inp)`."""
    for statement in body:
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.args and isinstance(node.args[0], ast.Starred):
                return node.func.id
    return None
