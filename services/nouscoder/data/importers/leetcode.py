"""LeetCodeDataset (newfacade/LeetCodeDataset): problems about a method, with tests `assert candidate(...) == value`.

The asserts are parsed and never executed. A row with a statement of another form is rejected.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nouscoder.data.importers.fields import Row, plain, text
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallCase, CallTests, Prelude


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The reference is a module: the data set's imports and helpers, then the solution."""
    entry_point = text(row, "entry_point").removeprefix("Solution().")
    meta = row.get("meta") or {}
    problem = Problem(
        problem_id=text(row, "task_id"),
        prompt=text(row, "query", "problem_description"),
        tests=CallTests(entry_point, tuple(call_cases(text(row, "test")))),
        # The prompt uses `List` and other names without imports, as LeetCode does.
        prelude=Prelude.LCB,
        difficulty=str(row.get("difficulty") or meta.get("difficulty") or "").lower(),
        source="leetcode",
    )
    program = f"{row.get('prompt') or ''}\n{row['completion']}\n" if row.get("completion") else ""
    date = str(row.get("estimated_date") or "")[:10]
    return ReferencedProblem(problem, (Reference(program),) if program else (), {"date": date} if date else {})


def call_cases(check: str) -> Iterator[CallCase]:
    """The cases of a `check(candidate)` function. Raises Rejected for a statement of another form."""
    try:
        module = ast.parse(check)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"the tests are not python: {error}") from None
    if len(module.body) != 1 or not isinstance(module.body[0], ast.FunctionDef):
        raise Rejected(Reason.UNREADABLE_TESTS, "the tests are not one function")
    for statement in module.body[0].body:
        yield call_case(statement, "candidate")


def call_case(statement: ast.stmt, function: str) -> CallCase:
    """The case of `assert function(...) == value`, whose arguments and value are literals. Raises Rejected."""
    if not (
        isinstance(statement, ast.Assert)
        and isinstance(statement.test, ast.Compare)
        and len(statement.test.ops) == 1
        and isinstance(statement.test.ops[0], ast.Eq)
        and isinstance(statement.test.left, ast.Call)
        and isinstance(statement.test.left.func, ast.Name)
        and statement.test.left.func.id == function
    ):
        form = f"not of the form assert {function}(...) == value: {ast.unparse(statement)[:100]}"
        raise Rejected(Reason.UNREADABLE_TESTS, form)
    call = statement.test.left
    try:
        kwargs = {str(keyword.arg): plain(ast.literal_eval(keyword.value)) for keyword in call.keywords if keyword.arg}
        args = tuple(plain(ast.literal_eval(argument)) for argument in call.args)
        expected = plain(ast.literal_eval(statement.test.comparators[0]))
    except ValueError as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"not a literal: {error}") from None
    if len(kwargs) != len(call.keywords):
        raise Rejected(Reason.UNREADABLE_TESTS, "a ** argument")
    return CallCase(args, kwargs, expected)
