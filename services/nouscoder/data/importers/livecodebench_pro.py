"""LiveCodeBench Pro: a folder with the rows of QAQAQAQAQ/LiveCodeBench-Pro, and the archives of its tests.

Rows have problem_id, problem_statement and difficulty. The archives PROBLEM_ID.zip of
QAQAQAQAQ/LiveCodeBench-Pro-Testcase hold config.yaml, testdata/ and a testlib checker. Programs are in C++.
Source: YanagiOrigami/LightCPVerifier, src/problem_manager.js.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nouscoder.data.bounded_files import FileRefused
from nouscoder.data.importers.checkers import cpp_checker, limits_of
from nouscoder.data.importers.fields import Reason, Rejected, Row, facts_of, optional_text, stdin_tests, text
from nouscoder.data.importers.rows import Format, file_rows, files_with
from nouscoder.data.json_records import SourceRow
from nouscoder.data.packages import PackageFiles, packages_at
from nouscoder.data.problems import ReferencedProblem
from nouscoder.data.yaml_text import yaml_mapping
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CheckerTests, Limits

_TIME = re.compile(r"\s*([0-9.]+)\s*(ms|s)?\s*", re.IGNORECASE)
_MEMORY = re.compile(r"\s*([0-9.]+)\s*([kmg]?)b?\s*", re.IGNORECASE)
_MIB = {"": 1 / 1024**2, "k": 1 / 1024, "m": 1.0, "g": 1024.0}


def pro_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    """The rows of problems, each with the files of its archive."""
    number = 0
    archives = {file.stem: file for file in sorted(path.rglob("*.zip"))}
    for file in files_with(path, "problem_statement"):
        for row in file_rows(file, 0):
            number += 1
            if number <= skip:
                continue
            if not isinstance(row.value, dict):
                yield SourceRow(number, row.value, row.fault)
                continue
            archive = archives.get(optional_text(row.value, "problem_id"))
            packages = packages_at(archive, "config.yaml") if archive else iter(())
            try:
                _, files = next(packages, ("", None))
                yield SourceRow(number, {**row.value, "files": files})
            except FileRefused as error:
                yield SourceRow(number, {**row.value, "files": str(error)})


def read_livecodebench_pro(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row and of its archive."""
    files = row.get("files")
    if files is None:
        raise Rejected(Reason.NO_TESTS, "there is no archive of this problem with a config.yaml")
    if not isinstance(files, PackageFiles):
        raise Rejected(Reason.MALFORMED, f"the archive is refused: {files}")
    config = yaml_mapping(files.text("config.yaml"))
    problem = Problem(
        problem_id=text(row, "problem_id"),
        prompt=text(row, "problem_statement"),
        tests=_pro_tests(files, config),
        limits=_pro_limits(config),
        difficulty=optional_text(row, "difficulty"),
        source="livecodebench_pro",
        family=optional_text(row, "platform"),
        languages=("cpp",),
    )
    return ReferencedProblem(problem, metadata=facts_of(row, "problem_title", "platform"), names_languages=True)


def _pro_tests(files: PackageFiles, config: dict[str, Any]) -> CheckerTests:
    if (kind := config.get("type", "default")) != "default":
        raise Rejected(Reason.UNSUPPORTED, f"a problem of the type {kind!r:.40}")
    checker = cpp_checker(files.text(str(config.get("checker") or "chk.cc")))
    names = _pro_names(config)  # the first one without a file ends them
    return CheckerTests(stdin_tests((files.text(given), files.text(wanted)) for given, wanted in names).cases, checker)


def _pro_names(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(input, output) of each test: listed, or numbered from 1."""
    given = (str(config.get("input_prefix") or ""), str(config.get("input_suffix") or ".in"))
    wanted = (str(config.get("output_prefix") or ""), str(config.get("output_suffix") or ".ans"))
    number = 0
    for group in config.get("subtasks") or ():
        for case in group.get("cases") or ():
            yield f"testdata/{case['input']}", f"testdata/{case['output']}"
        for _ in range(int(group.get("n_cases") or 0)):
            number += 1
            yield f"testdata/{str(number).join(given)}", f"testdata/{str(number).join(wanted)}"


def _pro_limits(config: dict[str, Any]) -> Limits:
    """The limits of the whole problem, or the widest of its groups."""
    places = [config, *(config.get("subtasks") or ())]
    times = [place.get("time_limit") or place.get("time") for place in places]
    sizes = [place.get("memory_limit") or place.get("memory") for place in places]
    seconds = [found for value in times if value and (found := _in(_TIME, value, {"ms": 0.001, "s": 1.0, "": 1.0}))]
    mebibytes = [found for value in sizes if value and (found := _in(_MEMORY, value, _MIB))]
    return limits_of(max(seconds, default=1.0), max(mebibytes, default=256.0))


def _in(form: re.Pattern[str], value: Any, units: dict[str, float]) -> float:
    found = form.fullmatch(str(value))
    if found is None:
        raise Rejected(Reason.MALFORMED, f"config.yaml has the limit {value!r:.40}")
    return float(found[1]) * units[(found[2] or "").lower()]


FORMATS = {
    "livecodebench_pro": Format(read_livecodebench_pro, "LiveCodeBench Pro: a folder with rows and archives", pro_rows)
}
