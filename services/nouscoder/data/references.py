"""Problems with their reference solutions, from every problem file that we read.

A problem file of ours (JSONL) may have `"references": ["code", {"language": "cpp", "code": "..."}]` in a line;
LeetCodeDataset has one a problem; CodeContests as packed by rllm has none.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nouscoder.data.code_contests import read_code_contests
from nouscoder.data.leetcode import read_leetcode
from nouscoder.data.problems import ProblemFileError, load_problems
from nouscoder.domain.problem import Problem


@dataclass(frozen=True, slots=True)
class Reference:
    """A program that is held to be right."""

    code: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class ReferencedProblem:
    """A problem and its reference solutions, perhaps none."""

    problem: Problem
    references: tuple[Reference, ...] = ()


def read_referenced(path: Path) -> list[ReferencedProblem]:
    """Read a problem file of any kind. Raises ProblemFileError naming the file and the line at fault."""
    if path.suffix != ".gz":
        references = _references(path)
        return [ReferencedProblem(one, references.get(one.problem_id, ())) for one in load_problems(path)]
    if _begins_with_array(path):
        return [ReferencedProblem(problem) for problem in read_code_contests(path)]
    return [ReferencedProblem(one.problem, (Reference(one.program),)) for one in read_leetcode(path)]


def _begins_with_array(path: Path) -> bool:
    try:
        with gzip.open(path, "rb") as file:
            return file.read(64).lstrip().startswith(b"[")
    except (OSError, EOFError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error


def _references(path: Path) -> dict[str, tuple[Reference, ...]]:
    """By problem. What is no JSON is complained of by `load_problems`."""
    found = {}
    try:
        lines = path.read_text(encoding="utf8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.strip() else {}
            given = record.get("references", [])
            if not isinstance(given, list):
                raise ValueError("not a list")
            found[str(record.get("problem_id"))] = tuple(_reference(one) for one in given)
        except (ValueError, TypeError, AttributeError) as error:
            raise ProblemFileError(f"{path}, line {number}: references: {error}") from error
    return found


def _reference(given: Any) -> Reference:
    match given:
        case str() as code:
            return Reference(code)
        case {"code": str() as code, **rest} if not rest:
            return Reference(code)
        case {"code": str() as code, "language": str() as language, **rest} if not rest:
            return Reference(code, language)
        case _:
            raise ValueError(f"{given!r:.80} is neither code nor an object of language and code")
