"""Reads problem files of every form: JSON lines, parquet, and two data sets as published.

LeetCodeDataset and rllm's CodeContests are recognised by their first row; other data sets are imported first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nouscoder.data.importers.formats import format_named
from nouscoder.data.importers.rejection import Rejected
from nouscoder.data.importers.rows import file_rows
from nouscoder.data.json_records import UnreadableFile
from nouscoder.data.problem_parquet import is_parquet, read_parquet
from nouscoder.data.problems import ProblemFileError, ReferenceBody, read_bodies
from nouscoder.data.references import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem


def read_problems(path: Path) -> Iterator[Problem]:
    """The problems of a problem file. One at a time is in memory. Raises Unusable, naming the file and the line."""
    if is_parquet(path):
        return (item.problem for item in read_parquet(path))
    return (body.record() for body in read_bodies(path))


def load_problems(path: Path) -> list[Problem]:
    """All problems of a problem file, in memory. Raises what `read_problems` raises."""
    return list(read_problems(path))


def read_referenced(path: Path) -> Iterator[ReferencedProblem]:
    """The problems of a file with their references. Raises ProblemFileError or another Unusable."""
    if is_parquet(path):
        return read_parquet(path)
    name = _recognised(path)
    if name:
        return _imported(path, name)
    return (
        ReferencedProblem(body.record(), tuple(_reference(one) for one in body.references), body.metadata)
        for body in read_bodies(path)
    )


def _recognised(path: Path) -> str:
    """The name of the data set whose layout the first row has; empty for a problem file."""
    try:
        first = next(file_rows(path, 0), None)
    except UnreadableFile as error:
        raise ProblemFileError(str(error)) from error
    row = first.value if first is not None and isinstance(first.value, dict) else {}
    if {"problem", "tests"} <= row.keys():
        return "rllm_contests"
    return "leetcode" if {"query", "entry_point", "test"} <= row.keys() else ""


def _imported(path: Path, name: str) -> Iterator[ReferencedProblem]:
    known = format_named(name)
    for row in known.rows(path, 0):
        try:
            yield known.read(row.value, row.number)
        except (Rejected, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProblemFileError(f"{path}, row {row.number}: {error}") from error


def _reference(given: str | ReferenceBody) -> Reference:
    return Reference(given) if isinstance(given, str) else Reference(given.code, given.language)
