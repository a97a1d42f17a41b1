"""CodeContests in the format of rllm: stdin problems with expected outputs, without reference solutions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from nouscoder.data.problems import ProblemFileError
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests


def read_code_contests(path: Path) -> list[Problem]:
    """Read the gzipped JSON array. Raises ProblemFileError naming the invalid entry."""
    try:
        with gzip.open(path, "rt", encoding="utf8") as file:
            records = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error
    problems = []
    for number, record in enumerate(records):
        try:
            tests = record["tests"]
            pairs = zip(tests["inputs"], tests["outputs"], strict=True)
            cases = tuple(StdinCase(given, wanted) for given, wanted in pairs)
            name = f"code-contests-{number}"
            problems.append(Problem(name, record["problem"], StdinTests(cases), source="code_contests"))
        except (KeyError, TypeError, ValueError) as error:
            raise ProblemFileError(f"{path}, entry {number}: {type(error).__name__}: {error}") from error
    return problems
