"""Kattis and DOMjudge problem packages: folders with problem.yaml, a folder of such folders, or .zip files.

Read are the statement (Markdown or TeX), data/sample and data/secret, the limits, the flags of the validator, a custom
output validator or interactor in Python or C++, and accepted submissions. The formats are the legacy one, 2023-07 and
2025-09. Source: https://www.kattis.com/problem-package-format/spec/

A problem has one comparison for all its tests. So a package whose groups of tests have different flags is rejected, and
so is each flag that has no counterpart here.
"""

from __future__ import annotations

import configparser
import math
import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from nouscoder.data.bounded_files import FileRefused
from nouscoder.data.importers.fields import MAX_REFERENCES, Reason, Rejected, Row
from nouscoder.data.importers.rows import Format, package_rows
from nouscoder.data.json_records import SourceRow
from nouscoder.data.packages import PackageFiles
from nouscoder.data.problems import Reference, ReferencedProblem
from nouscoder.data.yaml_text import yaml_mapping
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import (
    CheckerTests,
    Comparator,
    ComparatorKind,
    InteractiveTests,
    JudgeProgram,
    JudgeProtocol,
    Limits,
    StdinCase,
    StdinTests,
)

_PYTHON = """import sys
sys.argv += {flags!r}
exec(compile({source!r}, "validator", "exec"))
"""
# The constructor runs before main and before every other constructor. It starts the program again with the flags.
_CPP = """#include <cstdlib>
#include <unistd.h>
__attribute__((constructor(101))) static void nouscoder_flags(int argc, char **argv) {{
    const char *known[] = {{{known}nullptr}}, *all[8 + sizeof known / sizeof *known];
    if (argc > 7 || getenv("NOUSCODER_FLAGS")) return;
    for (int i = 0; i < argc; i++) all[i] = argv[i];
    for (int i = 0; i == 0 || known[i - 1]; i++) all[argc + i] = known[i];
    setenv("NOUSCODER_FLAGS", "1", 1);
    execv("/proc/self/exe", const_cast<char **>(all));
    _exit(1);
}}
"""
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_FLAG = re.compile(r"[\w.+=:,/-]+")


def validator_of(files: PackageFiles, flags: Sequence[str]) -> JudgeProgram:
    """The package's validator. Raises Rejected for one in another language, or of several programs."""
    found = [name for folder in _VALIDATORS for name in files.under(folder, ".py", ".cpp", ".cc")]
    if len(found) != 1:
        raise Rejected(Reason.UNSUPPORTED, f"{len(found)} validator programs in Python or C++, not one")
    source = files.text(found[0])
    if found[0].endswith(".py"):
        code = _PYTHON.format(flags=list(flags), source=source) if flags else source
        return JudgeProgram(code, "python", JudgeProtocol.KATTIS)
    if strange := next((flag for flag in flags if not _FLAG.fullmatch(flag)), None):
        raise Rejected(Reason.UNSUPPORTED, f"the flag {strange!r:.100} for a validator in C++")
    known = "".join(f'"{flag}", ' for flag in flags)
    begin = _CPP.format(known=known) if flags else ""
    return JudgeProgram(begin + _with_headers(files, found[0], source, set()), "cpp", JudgeProtocol.KATTIS)


def _with_headers(files: PackageFiles, name: str, source: str, seen: set[str]) -> str:
    """The source with the package's own headers in place of their includes."""

    def header(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), found[1]))
        if path in seen or path not in files:
            return "" if path in seen else found[0]
        seen.add(path)
        return _with_headers(files, path, files.text(path), seen)

    return _INCLUDE.sub(header, source)


_VALIDATORS = ("output_validators", "output_validator")
_GROUP_FILES = ("testdata.yaml", "test_group.yaml")
_GROUP_KEYS = ("output_validator_flags", "output_validator_args")
_TOLERANCES = {
    "float_tolerance": "float_tolerance",
    "float_absolute_tolerance": "absolute_tolerance",
    "float_relative_tolerance": "relative_tolerance",
}


def _flags_of(files: PackageFiles, config: dict[str, Any], cases: Sequence[str]) -> tuple[str, ...]:
    """The flags for all test cases, which must be the same. Raises Rejected."""
    own = {
        name: _words(values[key], f"{key} in {name}")
        for name in files.under("data", ".yaml")
        for values in (_yaml(files, name),)
        for key in _GROUP_KEYS
        if key in values
    }
    found = {own[place] if (place := _place_of_flags(case, own)) else () for case in cases}
    if len(found) != 1:
        shown = " and ".join(sorted(repr(" ".join(flags)) for flags in found)[:2])
        raise Rejected(Reason.UNSUPPORTED, f"groups of tests have different flags of the validator: {shown:.200}")
    return _words(config.get("validator_flags"), "validator_flags") + found.pop()


def _place_of_flags(case: str, known: Collection[str]) -> str:
    """The file with the flags of a case: beside it, else in the nearest folder around it; empty when there is none."""
    if f"{case}.yaml" in known:
        return f"{case}.yaml"
    folder = case
    while folder := posixpath.dirname(folder):
        for name in _GROUP_FILES:
            if f"{folder}/{name}" in known:
                return f"{folder}/{name}"
    return ""


def _words(value: Any, name: str) -> tuple[str, ...]:
    """Flags as one text, or as a list."""
    if isinstance(value, list) and all(type(word) in (str, int, float) for word in value):  # YAML reads `off` as false
        return tuple(str(word) for word in value)
    if value is None or isinstance(value, str):
        return tuple((value or "").split())
    raise Rejected(Reason.UNSUPPORTED, f"{name:.100} is neither text nor a list")


def _comparator(flags: Sequence[str]) -> Comparator:
    """How the default validator compares with these flags. Raises Rejected for one that is unknown."""
    words, switches = list(flags), set()
    tolerances: dict[str, Any] = {}
    while words:
        flag = words.pop(0)
        if flag in ("case_sensitive", "space_change_sensitive"):
            switches.add(flag)
        elif flag in _TOLERANCES:
            tolerances[_TOLERANCES[flag]] = _number(words.pop(0) if words else None, f"the flag {flag}", 0.0)
        else:
            raise Rejected(Reason.UNSUPPORTED, f"the default validator has no flag {flag!r:.100}")
    kind = ComparatorKind.KATTIS if tolerances else ComparatorKind.TOKENS
    if "space_change_sensitive" in switches:
        if tolerances:
            raise Rejected(Reason.UNSUPPORTED, "space_change_sensitive together with a tolerance")
        kind = ComparatorKind.EXACT
    return Comparator(kind, ignore_case="case_sensitive" not in switches, **tolerances)


_LANGUAGES = {".py": "python", ".cpp": "cpp", ".cc": "cpp", ".c": "c", ".java": "java", ".go": "go", ".rs": "rust"}
_STATEMENTS = ("problem_statement/problem.en", "problem_statement/problem", "statement/problem.en", "statement/problem")
_MOST_SECONDS, _MOST_MIB = 3600.0, 1024.0**2


def packages(path: Path, skip: int) -> Iterator[SourceRow]:
    """The packages at a path. Raises ProblemFileError when there is none."""
    return package_rows(path, skip, "problem.yaml")


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a package, named by its folder."""
    files: PackageFiles = row["files"]
    config = _yaml(files, "problem.yaml")
    tests, comparator = _tests(files, config)
    problem = Problem(
        problem_id=row["name"],
        prompt=_statement(files) + _samples(files),
        tests=tests,
        limits=_limits(files, config),
        comparator=comparator,
        source="kattis",
        family=_short(config.get("source")),
    )
    return ReferencedProblem(problem, _accepted(files))


def _tests(
    files: PackageFiles, config: dict[str, Any]
) -> tuple[StdinTests | CheckerTests | InteractiveTests, Comparator]:
    names = _case_names(files, "sample", "secret")
    if not names:
        raise Rejected(Reason.NO_TESTS, "data/sample and data/secret hold no test")
    cases = tuple(_case(files, name) for name in names)
    flags = _flags_of(files, config, names)
    words = {word for key in ("validation", "type") for word in _words(config.get(key), key)}
    for unsupported in ("multipass", "multi-pass", "submit-answer"):
        if unsupported in words:
            raise Rejected(Reason.UNSUPPORTED, f"a {unsupported} problem")
    # Since 2023-07 a package says it by the folder alone.
    is_custom = "custom" in words or ("validation" not in config and bool(files.under("output_validator", "")))
    if "interactive" in words:
        return InteractiveTests(cases, validator_of(files, flags)), Comparator()
    if is_custom:
        return CheckerTests(cases, validator_of(files, flags)), Comparator()
    _require_no_special_program(files)
    return StdinTests(cases), _comparator(flags)


def _case_names(files: PackageFiles, *groups: str) -> list[str]:
    """The cases by their paths without an ending. Raises Rejected for one that needs more than its input."""
    for name in files.under("data", ""):
        if name.endswith(".args") or ".files/" in name:
            raise Rejected(Reason.UNSUPPORTED, f"{name} is an argument or a file for the program")
    return [name[: -len(".in")] for group in groups for name in files.under(f"data/{group}", ".in")]


def _case(files: PackageFiles, name: str) -> StdinCase:
    if f"{name}.ans" not in files:
        raise Rejected(Reason.UNREADABLE_TESTS, f"{name}.in has no .ans file")
    return StdinCase(files.text(f"{name}.in"), files.text(f"{name}.ans"))


def _require_no_special_program(files: PackageFiles) -> None:
    """DOMjudge may judge by a program of its own installation. Raises Rejected naming it."""
    ini = _domjudge(files)
    for key in ("special_compare", "special_run"):
        if name := ini.get(key):
            raise Rejected(Reason.UNSUPPORTED, f"{key} is {name:.100}, a program that is not in the package")


def _domjudge(files: PackageFiles) -> dict[str, str]:
    """The values of domjudge-problem.ini, without quotes; none without the file."""
    if "domjudge-problem.ini" not in files:
        return {}
    ini = configparser.ConfigParser(interpolation=None)
    try:
        ini.read_string("[problem]\n" + files.text("domjudge-problem.ini"))
    except configparser.Error as error:
        raise Rejected(Reason.MALFORMED, f"domjudge-problem.ini: {str(error).splitlines()[0]}") from None
    return {key: value.strip("'\"") for key, value in ini["problem"].items()}


def _limits(files: PackageFiles, config: dict[str, Any]) -> Limits:
    """The package's limits. A time limit counts CPU time; the wall time may be twice as long."""
    limits = config.get("limits") or {}
    if not isinstance(limits, dict):
        raise Rejected(Reason.MALFORMED, "limits in problem.yaml is not a mapping")
    seconds: Any = limits.get("time_limit")
    if ".timelimit" in files:
        seconds = files.text(".timelimit")
    seconds = _domjudge(files).get("timelimit", seconds)
    usual = Limits()
    cpu_time_s = _number(seconds, "the time limit", 0.001, _MOST_SECONDS) if seconds else usual.cpu_time_s
    memory = limits.get("memory")
    memory_bytes = int(_number(memory, "limits.memory", 1, _MOST_MIB)) * 1024**2 if memory else usual.memory_bytes
    wall_time_s = 2 * cpu_time_s + 1 if seconds else usual.wall_time_s
    return Limits(wall_time_s, cpu_time_s, memory_bytes, usual.output_bytes, usual.processes)


def _number(value: Any, name: str, least: float, most: float = math.inf) -> float:
    """A finite number within bounds. Raises Rejected."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not (math.isfinite(found) and least <= found <= most):
        bound = f" to {most:.10g}" if math.isfinite(most) else ""
        raise Rejected(Reason.MALFORMED, f"{name} must be a number from {least:g}{bound}, not {_short(value)!r}")
    return found


def _statement(files: PackageFiles) -> str:
    for name in _STATEMENTS:
        for suffix in (".md", ".tex"):
            if f"{name}{suffix}" in files:
                return files.text(f"{name}{suffix}")
    raise Rejected(Reason.MISSING_FIELD, "there is no statement in Markdown or TeX")


def _samples(files: PackageFiles) -> str:
    """The samples as text: a package's statement does not hold them."""
    cases = [_case(files, name) for name in _case_names(files, "sample")]
    return "".join(
        f"\n\nSample input {number}\n```\n{case.input}\n```\nSample output {number}\n```\n{case.output}\n```"
        for number, case in enumerate(cases, 1)
    )


def _accepted(files: PackageFiles) -> tuple[Reference, ...]:
    folder = "submissions/accepted"
    known = [name for name in files.under(folder, *_LANGUAGES) if posixpath.dirname(name) == folder]
    known.sort(key=lambda name: (not name.endswith(".py"), name))
    found = [Reference(files.text(name), _LANGUAGES[Path(name).suffix]) for name in known]
    # The first line names Python 2, for which there is no grader.
    return tuple([one for one in found if "python2" not in one.code.partition("\n")[0]][:MAX_REFERENCES])


def _yaml(files: PackageFiles, name: str) -> dict[str, Any]:
    text = files.text(name)
    try:
        return yaml_mapping(text)
    except FileRefused as error:
        raise Rejected(Reason.MALFORMED, f"{name}: {error}") from None


def _short(value: Any) -> str:
    """A value of problem.yaml as text; empty for a list or a mapping."""
    return str(value)[:200].strip() if isinstance(value, str | int | float) else ""


FORMATS = {
    "kattis": Format(read, "Kattis and DOMjudge problem packages: folders or .zip", packages),
}
