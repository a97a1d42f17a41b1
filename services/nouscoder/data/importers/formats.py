"""The formats by name. A module of this package is an importer if it has a dict FORMATS; no list names the modules.

A format of the user is an entry point, `package.module:name`, as `nouscoder data import` takes it.

`read_referenced` reads problem files of every form: JSON lines, parquet, and two data sets as published.
LeetCodeDataset and rllm's CodeContests are recognised by their first row; other data sets are imported first.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from nouscoder.data import importers
from nouscoder.data.bounded_files import STDIN
from nouscoder.data.importers.fields import Rejected
from nouscoder.data.importers.rows import Format, file_rows
from nouscoder.data.json_records import UnreadableFile
from nouscoder.data.problem_parquet import is_parquet, read_problem_file
from nouscoder.data.problems import FileFault, ProblemFileError, ReferencedProblem
from nouscoder.entry_points import PATTERN, load_entry_point
from nouscoder.errors import Unusable, did_you_mean
from nouscoder.input_file import regular

_NO_IMPORTERS = ("checkers", "fields", "formats", "options", "rows", "run")


FORMATS: dict[str, Format] = {}
for _module in pkgutil.iter_modules(importers.__path__):
    if _module.name not in _NO_IMPORTERS:
        FORMATS |= import_module(f"{importers.__name__}.{_module.name}").FORMATS
FORMATS = dict(sorted(FORMATS.items()))


def format_named(name: str) -> Format:
    """The format of this name, or that of the user which `package.module:name` names. Raises Unusable."""
    if re.fullmatch(PATTERN, name):
        users = load_entry_point("the format", name)
        if not isinstance(users, Format):
            raise Unusable(f"the format {name!r} is no nouscoder.data.importers.rows.Format")
        return users
    if name not in FORMATS:
        raise Unusable(
            f"there is no format {name!r}{did_you_mean(name, FORMATS)} (known formats: {', '.join(FORMATS)})"
        )
    return FORMATS[name]


def read_referenced(path: Path, refused: list[FileFault] | None = None) -> Iterator[ReferencedProblem]:
    """The problems of a file with their references. Raises ProblemFileError or another Unusable.

    With `refused`, wrong lines of a problem file are added to it and left out.
    """
    name = "" if is_parquet(path) else _recognised(path)
    return _imported(path, name) if name else read_problem_file(path, refused)


def _recognised(path: Path) -> str:
    """The name of the data set whose layout the first row has; empty for a problem file."""
    if path == STDIN:
        raise ProblemFileError("problems are read more than once: give a file, not standard input")
    try:
        first = next(file_rows(path, 0), None)
    except UnreadableFile as error:
        raise ProblemFileError(str(error)) from error
    regular(path, often=True)
    row = first.value if first is not None and isinstance(first.value, dict) else {}
    if {"problem", "tests"} <= row.keys() and "prompt" not in row:
        return "rllm_contests"
    return "leetcode" if {"query", "entry_point", "test"} <= row.keys() else ""


def _imported(path: Path, name: str) -> Iterator[ReferencedProblem]:
    known = format_named(name)
    for row in known.rows(path, 0):
        try:
            yield known.read(row.value, row.number)
        except (Rejected, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProblemFileError(f"{path}, row {row.number}: {error}") from error
