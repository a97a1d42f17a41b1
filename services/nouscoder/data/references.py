"""Reads problems with their reference solutions from problem files of every supported format.

A line of NousCoder's own format (JSONL) may have `"references": ["code", {"language": "cpp", "code": "..."}]`.
LeetCodeDataset has one reference per problem, and CodeContests in the format of rllm has none.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

from nouscoder.data.code_contests import read_code_contests
from nouscoder.data.leetcode import read_leetcode
from nouscoder.data.problems import ProblemFileError, ReferenceBody, read_bodies
from nouscoder.domain.problem import Problem


@dataclass(frozen=True, slots=True)
class Reference:
    """A program that is assumed to be right."""

    code: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class ReferencedProblem:
    """A problem and its reference solutions, if any."""

    problem: Problem
    references: tuple[Reference, ...] = ()


def read_referenced(path: Path) -> list[ReferencedProblem]:
    """Read a problem file of any supported format. Raises ProblemFileError naming the file and the invalid line."""
    if path.suffix != ".gz":
        return [
            ReferencedProblem(body.record(), tuple(_reference(one) for one in body.references))
            for body in read_bodies(path)
        ]
    if _begins_with_array(path):
        return [ReferencedProblem(problem) for problem in read_code_contests(path)]
    return [ReferencedProblem(one.problem, (Reference(one.program),)) for one in read_leetcode(path)]


def _begins_with_array(path: Path) -> bool:
    try:
        with gzip.open(path, "rb") as file:
            return file.read(64).lstrip().startswith(b"[")
    except (OSError, EOFError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error


def _reference(given: str | ReferenceBody) -> Reference:
    return Reference(given) if isinstance(given, str) else Reference(given.code, given.language)
