"""LeetCodeDataset (newfacade, v0.2): call-based problems whose tests are `assert candidate(...) == value`.

The asserts are parsed and never executed. A statement of another form is an error that names the problem.
"""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nouscoder.data.problems import ProblemFileError
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallCase, CallTests, Prelude

_CLASS_PREFIX = "Solution()."


@dataclass(frozen=True, slots=True)
class LeetCodeProblem:
    """A problem with its reference solution.

    `check` is the data set's test function and `candidate` the expression that it tests. `program` is a whole module:
    the data set's imports and helpers, then the reference solution.
    """

    problem: Problem
    program: str
    check: str
    candidate: str


def read_leetcode(path: Path) -> list[LeetCodeProblem]:
    """Read the gzipped JSONL. Raises ProblemFileError naming the invalid line."""
    return [_problem(path, number, record) for number, record in enumerate(_records(path), 1)]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, EOFError, ValueError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error


def _problem(path: Path, number: int, record: dict[str, Any]) -> LeetCodeProblem:
    try:
        tests = CallTests(record["entry_point"].removeprefix(_CLASS_PREFIX), tuple(call_cases(record["test"])))
        return LeetCodeProblem(
            problem=Problem(
                problem_id=record["task_id"],
                prompt=record["query"],
                tests=tests,
                # The prompt uses `List` and other names without imports, as LeetCode does.
                prelude=Prelude.LCB,
                difficulty=str(record.get("meta", {}).get("difficulty", "")).lower(),
                source="leetcode",
            ),
            program=f"{record['prompt']}\n{record['completion']}\n",
            check=record["test"],
            candidate=record["entry_point"],
        )
    except (KeyError, ValueError, SyntaxError) as error:
        raise ProblemFileError(f"{path}, line {number}: {type(error).__name__}: {error}") from error


def call_cases(check: str) -> Iterator[CallCase]:
    """The cases of a `check(candidate)` function. Raises ValueError for a statement of another form."""
    module = ast.parse(check)
    if len(module.body) != 1 or not isinstance(module.body[0], ast.FunctionDef):
        raise ValueError("the tests are not one function")
    for statement in module.body[0].body:
        yield _case(statement)


def _case(statement: ast.stmt) -> CallCase:
    if not (
        isinstance(statement, ast.Assert)
        and isinstance(statement.test, ast.Compare)
        and len(statement.test.ops) == 1
        and isinstance(statement.test.ops[0], ast.Eq)
        and isinstance(statement.test.left, ast.Call)
        and isinstance(statement.test.left.func, ast.Name)
        and statement.test.left.func.id == "candidate"
    ):
        raise ValueError(f"not of the form assert candidate(...) == value: {ast.unparse(statement)[:100]}")
    call = statement.test.left
    kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    if len(kwargs) != len(call.keywords):
        raise ValueError("a ** argument")
    args = tuple(ast.literal_eval(argument) for argument in call.args)
    return CallCase(args, kwargs, ast.literal_eval(statement.test.comparators[0]))
