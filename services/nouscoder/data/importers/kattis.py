"""Kattis and DOMjudge problem packages: folders with problem.yaml, a folder of such folders, or .zip files.

Read are the statement (Markdown or TeX), data/sample and data/secret, the limits, a custom output validator or
interactor in Python or C++, and accepted submissions. The default validator compares tokens with
the given tolerances; unlike Kattis, case matters. Source: https://www.kattis.com/problem-package-format/spec/legacy

Output validators become checkers and interactors with testlib's exit codes. A validator is called as `validator input
answer feedback_folder < output`, or talks over stdin and stdout. It exits with 42 (right) or 43 (wrong). A checker is
called as `checker input output answer` and exits with 0 or 1. Code before the validator's own translates arguments and
exit codes; every other exit becomes 3, the judge's own failure.
"""

from __future__ import annotations

import configparser
import re
import tempfile
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from nouscoder.data.importers.fields import MAX_REFERENCES, Reason, Rejected, Row
from nouscoder.data.importers.rows import Format, SourceRow
from nouscoder.data.problems import ProblemFileError, Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import (
    CheckerTests,
    Comparator,
    InteractiveTests,
    JudgeProgram,
    Limits,
    StdinCase,
    StdinTests,
)

_PYTHON = """import os, sys, tempfile
_input, _output, _answer = sys.argv[1:4]
sys.argv = ["validator", _input, _answer, tempfile.mkdtemp() + "/", *{flags!r}]
if {is_checker}:
    os.dup2(os.open(_output, os.O_RDONLY), 0)
try:
    exec(compile({source!r}, "validator", "exec"), {{"__name__": "__main__"}})
    _status = 3
except SystemExit as _end:
    _status = _end.code
sys.stdout.flush()
sys.exit({{42: 0, 43: 1}}.get(_status, 3))
"""

# The constructor runs before main and before every other constructor. The child goes on to the validator's main.
_CPP = """#include <cstdlib>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((constructor(101))) static void nouscoder_translate(int argc, char **argv) {{
    static char feedback[] = "/tmp/feedbackXXXXXX\\0";
    if (argc != 4 || !mkdtemp(feedback)) _exit(3);
    feedback[sizeof feedback - 2] = '/';
    pid_t child = fork();
    if (child < 0) _exit(3);
    if (child > 0) {{
        int status = 0;
        if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) _exit(3);
        _exit(WEXITSTATUS(status) == 42 ? 0 : WEXITSTATUS(status) == 43 ? 1 : 3);
    }}
    if ({is_checker} && dup2(open(argv[2], O_RDONLY), 0) < 0) _exit(3);
    argv[2] = argv[3];
    argv[3] = feedback;
}}
"""
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def validator_of(folder: Path, flags: list[str], *, is_interactive: bool) -> JudgeProgram:
    """The package's validator. Raises Rejected for one in another language, or of several programs."""
    files = [
        file
        for name in ("output_validators", "output_validator")
        for file in sorted((folder / name).rglob("*"))
        if file.suffix in (".py", ".cpp", ".cc")
    ]
    if len(files) != 1:
        raise Rejected(Reason.UNSUPPORTED, f"{len(files)} validator programs in Python or C++, not one")
    source = files[0].read_text(encoding="utf8")
    if files[0].suffix == ".py":
        code = _PYTHON.format(flags=flags, source=source, is_checker=not is_interactive)
        return JudgeProgram(code, "python")
    if flags:
        raise Rejected(Reason.UNSUPPORTED, "flags for a validator in C++")
    is_checker = "false" if is_interactive else "true"
    return JudgeProgram(_CPP.format(is_checker=is_checker) + _with_headers(files[0], source, set()), "cpp")


def _with_headers(file: Path, source: str, seen: set[Path]) -> str:
    """The source with the package's own headers in place of their includes."""

    def header(found: re.Match[str]) -> str:
        path = (file.parent / found[1]).resolve()
        if path in seen or not path.is_relative_to(file.parent.resolve()) or not path.is_file():
            return "" if path in seen else found[0]
        seen.add(path)
        return _with_headers(path, path.read_text(encoding="utf8"), seen)

    return _INCLUDE.sub(header, source)


_LANGUAGES = {".py": "python", ".cpp": "cpp", ".cc": "cpp", ".c": "c", ".java": "java", ".go": "go", ".rs": "rust"}
_STATEMENTS = ("problem_statement/problem.en", "problem_statement/problem", "statement/problem.en", "statement/problem")
_MAX_UNPACKED_BYTES = 4 * 1024**3


def packages(path: Path, skip: int) -> Iterator[SourceRow]:
    """The packages at a path. Raises ProblemFileError when there is none."""
    if path.suffix == ".zip":
        with tempfile.TemporaryDirectory(prefix="nouscoder-package-") as folder:
            _unpack(path, Path(folder))
            yield from _folders(Path(folder), path, skip)
    else:
        yield from _folders(path, path, skip)


def _folders(folder: Path, path: Path, skip: int) -> Iterator[SourceRow]:
    found = [
        file.parent for file in (folder / "problem.yaml", *sorted(folder.glob("*/problem.yaml"))) if file.is_file()
    ]
    if not found:
        raise ProblemFileError(f"{path} holds no problem.yaml")
    for number, each in enumerate(found, 1):
        if number > skip:
            yield SourceRow(number, {"folder": each, "name": path.stem if each == folder else each.name})


def _unpack(path: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(path) as packed:
            if sum(info.file_size for info in packed.infolist()) > _MAX_UNPACKED_BYTES:
                raise ProblemFileError(f"{path} is larger than {_MAX_UNPACKED_BYTES} bytes when unpacked")
            packed.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a package, named by its folder."""
    folder: Path = row["folder"]
    config = _yaml(folder / "problem.yaml")
    tests, comparator = _tests(folder, config)
    problem = Problem(
        problem_id=row["name"],
        prompt=_statement(folder) + _samples(folder),
        tests=tests,
        limits=_limits(folder, config),
        comparator=comparator,
        source="kattis",
        family=str(config.get("source") or ""),
    )
    return ReferencedProblem(problem, _accepted(folder))


def _tests(folder: Path, config: dict[str, Any]) -> tuple[StdinTests | CheckerTests | InteractiveTests, Comparator]:
    cases = tuple(_cases(folder, "sample", "secret"))
    if not cases:
        raise Rejected(Reason.NO_TESTS, "data/sample and data/secret hold no test")
    words = str(config.get("validation") or config.get("type") or "default").split()
    flags = str(config.get("validator_flags") or "").split()
    if "multipass" in words or "multi-pass" in words:
        raise Rejected(Reason.UNSUPPORTED, "a multi-pass problem")
    is_interactive = "interactive" in words
    if "custom" not in words and not is_interactive:
        _require_no_special_program(folder)
        return StdinTests(cases), _comparator(flags)
    judge = validator_of(folder, flags, is_interactive=is_interactive)
    return (InteractiveTests(cases, judge) if is_interactive else CheckerTests(cases, judge)), Comparator()


def _cases(folder: Path, *names: str) -> Iterator[StdinCase]:
    for name in names:
        for given in sorted((folder / "data" / name).rglob("*.in")):
            answer = given.with_suffix(".ans")
            if not answer.is_file():
                raise Rejected(Reason.UNREADABLE_TESTS, f"{given.name} has no .ans file")
            yield StdinCase(_text(given), _text(answer))


def _comparator(flags: list[str]) -> Comparator:
    """The default validator's flags: float_tolerance E, float_absolute_tolerance E, float_relative_tolerance E."""
    values = {flag: float(value) for flag, value in pairwise(flags) if flag.startswith("float_")}
    return Comparator(
        float_tolerance=values.get("float_tolerance", 0.0),
        absolute_tolerance=values.get("float_absolute_tolerance", 0.0),
        relative_tolerance=values.get("float_relative_tolerance", 0.0),
    )


def _require_no_special_program(folder: Path) -> None:
    """DOMjudge may judge by a program of its own installation. Raises Rejected naming it."""
    ini = _domjudge(folder)
    for key in ("special_compare", "special_run"):
        if name := ini.get(key):
            raise Rejected(Reason.UNSUPPORTED, f"{key} is {name:.100}, a program that is not in the package")


def _domjudge(folder: Path) -> dict[str, str]:
    """The values of domjudge-problem.ini, without quotes; none without the file."""
    file = folder / "domjudge-problem.ini"
    if not file.is_file():
        return {}
    ini = configparser.ConfigParser(interpolation=None)
    try:
        ini.read_string("[problem]\n" + _text(file))
    except configparser.Error as error:
        raise Rejected(Reason.MALFORMED, f"domjudge-problem.ini: {str(error).splitlines()[0]}") from None
    return {key: value.strip("'\"") for key, value in ini["problem"].items()}


def _limits(folder: Path, config: dict[str, Any]) -> Limits:
    """The package's limits. A time limit counts CPU time; the wall time may be twice as long."""
    limits = config.get("limits") or {}
    seconds: Any = limits.get("time_limit")
    if (folder / ".timelimit").is_file():
        seconds = _text(folder / ".timelimit")
    seconds = _domjudge(folder).get("timelimit", seconds)
    usual = Limits()
    cpu_time_s = float(seconds) if seconds else usual.cpu_time_s
    memory_bytes = int(limits["memory"]) * 1024**2 if limits.get("memory") else usual.memory_bytes
    wall_time_s = 2 * cpu_time_s + 1 if seconds else usual.wall_time_s
    return Limits(wall_time_s, cpu_time_s, memory_bytes, usual.output_bytes, usual.processes)


def _statement(folder: Path) -> str:
    for name in _STATEMENTS:
        for suffix in (".md", ".tex"):
            file = folder / f"{name}{suffix}"
            if file.is_file():
                return _text(file)
    raise Rejected(Reason.MISSING_FIELD, "there is no statement in Markdown or TeX")


def _samples(folder: Path) -> str:
    """The samples as text: a package's statement does not hold them."""
    return "".join(
        f"\n\nSample input {number}\n```\n{case.input}\n```\nSample output {number}\n```\n{case.output}\n```"
        for number, case in enumerate(_cases(folder, "sample"), 1)
    )


def _accepted(folder: Path) -> tuple[Reference, ...]:
    files = sorted((folder / "submissions" / "accepted").glob("*"), key=lambda file: (file.suffix != ".py", file.name))
    known = [file for file in files if file.suffix in _LANGUAGES and file.is_file()]
    return tuple(Reference(_text(file), _LANGUAGES[file.suffix]) for file in known[:MAX_REFERENCES])


def _yaml(file: Path) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(_text(file))
    except yaml.YAMLError as error:
        raise Rejected(Reason.MALFORMED, f"problem.yaml: {str(error).splitlines()[0]}") from None
    return value if isinstance(value, dict) else {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf8")
    except UnicodeDecodeError:
        raise Rejected(Reason.UNREADABLE_TESTS, f"{file.name} is not UTF-8") from None


FORMATS = {
    "kattis": Format(read, "Kattis and DOMjudge problem packages: folders or .zip", packages),
}
