"""Problem files: JSONL, one problem a line, tests in the shape of the grading API."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    Comparator,
    ComparatorKind,
    InteractiveTests,
    JudgeProgram,
    Limits,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
    Tests,
)
from nouscoder.errors import Unusable

_TYPES: dict[type[Tests], str] = {
    StdinTests: "stdin",
    CallTests: "call",
    AssertTests: "assert",
    CheckerTests: "checker",
    InteractiveTests: "interactive",
    MathTests: "math",
}


class ProblemFileError(Unusable):
    """A problem file cannot be used; the message names the file and the line."""


def save_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write `problems` as JSONL, replacing the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".part")
    with temporary.open("w", encoding="utf8") as file:
        for problem in problems:
            file.write(json.dumps(_record(problem), ensure_ascii=False) + "\n")
    temporary.replace(path)


def load_problems(path: Path) -> list[Problem]:
    """Read a problem file. Raises ProblemFileError naming the line at fault, or that the file holds no problem."""
    try:
        lines = path.read_text(encoding="utf8").split("\n")  # U+2028 in a prompt is no new line
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error
    problems: dict[str, Problem] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problem = _problem(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ProblemFileError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
        if problem.problem_id in problems:
            raise ProblemFileError(f"{path}, line {number}: problem_id {problem.problem_id!r} is there twice")
        problems[problem.problem_id] = problem
    if not problems:
        raise ProblemFileError(f"{path} holds no problem")
    return list(problems.values())


def _record(problem: Problem) -> dict[str, Any]:
    record = asdict(problem)
    record["tests"]["type"] = _TYPES[type(problem.tests)]
    return record


def _tests(record: dict[str, Any]) -> Tests:
    match record["type"]:
        case "stdin":
            return StdinTests(_stdin_cases(record))
        case "call":
            cases = (CallCase(tuple(c["args"]), c.get("kwargs", {}), c["expected"]) for c in record["cases"])
            return CallTests(record["entry_point"], tuple(cases))
        case "assert":
            return AssertTests(tuple(record["cases"]), record.get("setup", ""))
        case "checker":
            return CheckerTests(_stdin_cases(record), JudgeProgram(**record["checker"]))
        case "interactive":
            return InteractiveTests(_stdin_cases(record), JudgeProgram(**record["interactor"]))
        case "math":
            return MathTests(tuple(MathCase(**case) for case in record["cases"]))
        case other:
            raise ValueError(f"tests.type {other!r} is none of {', '.join(_TYPES.values())}")


def _stdin_cases(record: dict[str, Any]) -> tuple[StdinCase, ...]:
    return tuple(StdinCase(**case) for case in record["cases"])


def _problem(record: dict[str, Any]) -> Problem:
    comparator = dict(record.get("comparator", {}))
    if "kind" in comparator:
        comparator["kind"] = ComparatorKind(comparator["kind"])
    return Problem(
        problem_id=record["problem_id"],
        prompt=record["prompt"],
        tests=_tests(record["tests"]),
        limits=Limits(**record.get("limits", {})),
        comparator=Comparator(**comparator),
        text_is_code=record.get("text_is_code", False),
        family=record.get("family", ""),
    )
