"""Sets whose outputs a checker judges: Codeforces, CodeContests+, CodeContests-O, HardTests, LiveCodeBench Pro.

Codeforces (open-r1/codeforces): id, title, description, input_format, output_format, note, examples and official_tests
([{input, output}]), time_limit (seconds), memory_limit (MB), input_mode, interaction_format, rating, contest_start.
`generated_checker` is Python with the arguments `input answer output`, and prints 1 for right, else 0 or a share.
Source: huggingface/open-r1, utils/competitive_programming/cf_scoring.py.

CodeContests+ (ByteDance-Seed/Code-Contests-Plus, the parts 1x to 5x): id, title, description, time_limit (ms),
memory_limit (MB), test_cases ([{input, output}]), checker (C++ with testlib), correct_submissions and
incorrect_submissions ([{code, language}]).

CodeContests-O (caijanfeng/CodeContests-O): name, description, corner_cases ([{input: {stdin}, output: {stdout}}]) and
the checker. An output that equals the expected one, without case and empty lines, is right before the checker is asked.
Source: cai-jianfeng/CodeContests-O, core/validator.py and utils/helpers.py.

HardTests: a folder with the files of sigcp/hardtests_problems (pid, question_content, solutions, ...) and of
sigcp/hardtests_tests (pid, test_cases: base64 of zlib of a pickle of JSON, test_cases_kit). Both are joined by pid.
`output_judging_function(input, output, answer)` in the kit is Python, or null for the plain comparison.

LiveCodeBench Pro: a folder with the rows of QAQAQAQAQ/LiveCodeBench-Pro (problem_id, problem_statement, difficulty) and
the archives PROBLEM_ID.zip of QAQAQAQAQ/LiveCodeBench-Pro-Testcase: config.yaml, testdata/ and a testlib checker.
Source: YanagiOrigami/LightCPVerifier, src/problem_manager.js. Programs are in C++.

INVARIANT: no program of a data set runs during an import; checkers run in the verifier's sandbox. Of a set in two parts
the rows of one part are on the disk, and in memory is one row of each.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nouscoder.data.bounded_files import FileRefused, PackageFiles, SourceRow, packages_at, yaml_mapping
from nouscoder.data.importers.contests import packed_cases
from nouscoder.data.importers.fields import (
    MAX_REFERENCES,
    Reason,
    Rejected,
    Row,
    decoded,
    facts_of,
    optional_text,
    parsed_python,
    shown,
    stdin_tests,
    text,
)
from nouscoder.data.importers.rows import Format, column_names, file_rows
from nouscoder.data.problems import ProblemFileError, Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import (
    LANGUAGES,
    CheckerTests,
    Comparator,
    JudgeProgram,
    Limits,
    StdinTests,
    language_name,
)

# Checkers. All get the protocol of testlib: the arguments are `input output answer`, and exit code 0 is right.

_PRINTING = """import contextlib, io, sys
given, output, answer = sys.argv[1:4]
sys.argv = ["checker.py", given, answer, output]
said, code = io.StringIO(), None
try:
    with contextlib.redirect_stdout(said):
        exec(compile({source!r}, "checker.py", "exec"), {{"__name__": "__main__"}})
except SystemExit as end:
    code = end.code
try:
    points = float(said.getvalue()) if code in (None, 0) else None
except ValueError:
    points = None
if points is None:
    sys.exit(3)  # the checker has failed, not the program
if 0 < points < 1:
    print("points", points)
    sys.exit(7)
sys.exit(0 if points == 1 else 1)
"""
_FUNCTION = "output_judging_function"
_JUDGING = """import sys
given, output, answer = (open(name, encoding="utf8", errors="replace").read() for name in sys.argv[1:4])
names = {{"__name__": "judge"}}
exec(compile({source!r}, "judge.py", "exec"), names)
sys.exit(0 if names["output_judging_function"](given, output, answer) else 1)
"""
_TESTLIB = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"][^<">\n]*testlib\.h[">].*$', re.MULTILINE)


@cache
def _header(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf8")


def _cpp_checker(source: str, before: str = "") -> JudgeProgram:
    """A checker in C++. What it needs of testlib.h takes the place of the first include."""
    found = _TESTLIB.search(source)
    if found is None:
        return JudgeProgram(before + source, "cpp")
    rest = _TESTLIB.sub("", source[found.end() :])
    return JudgeProgram(source[: found.start()] + _header("testlib_subset.h") + before + rest, "cpp")


def _judged(tests: StdinTests, checker: JudgeProgram | None) -> StdinTests | CheckerTests:
    return tests if checker is None else CheckerTests(tests.cases, checker)


# Limits.

_MOST_SECONDS, _MOST_MIB = 3600.0, 1024.0**2


def _limits(cpu_time_s: Any, memory_mib: Any) -> Limits:
    """A time limit counts CPU time; the wall time may be twice as long. Without a value they are the usual ones."""
    usual = Limits()
    seconds, mebibytes = (
        _number(cpu_time_s, "time limit", _MOST_SECONDS),
        _number(memory_mib, "memory limit", _MOST_MIB),
    )
    memory_bytes = int(mebibytes * 1024**2) if mebibytes else usual.memory_bytes
    if not seconds:
        return Limits(memory_bytes=memory_bytes)
    return Limits(2 * seconds + 1, seconds, memory_bytes)


def _number(value: Any, name: str, most: float) -> float:
    """A positive number; 0 for none. Raises Rejected."""
    try:
        found = float(value or 0)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not 0 <= found <= most:
        raise Rejected(Reason.MALFORMED, f"the {name} {value!r:.40} is no number up to {most:.0f}")
    return found


def _cases(value: Any, given: str = "input", wanted: str = "output") -> StdinTests:
    cases = decoded(value or [])
    if not isinstance(cases, list) or not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test case")
    return stdin_tests((case[given], case[wanted]) for case in cases)


def _programs(submissions: Any) -> tuple[Reference, ...]:
    """References from a list of {code, language}, those in Python first. Languages without a grader are left out."""
    known = [
        Reference(one["code"], language)
        for one in submissions or ()
        if one.get("code") and (language := language_name(str(one.get("language") or ""))) in LANGUAGES
    ]
    return tuple(sorted(known, key=lambda one: one.language != "python")[:MAX_REFERENCES])


# Codeforces.

_EPOCH = date(1970, 1, 1)


def read_codeforces(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. Generated tests are in files of their own, and are not read."""
    if optional_text(row, "interaction_format"):
        raise Rejected(Reason.UNSUPPORTED, "an interactive problem, whose interactor is not in the data set")
    if (mode := optional_text(row, "input_mode")) not in ("", "stdio"):
        raise Rejected(Reason.NEEDS_FILES, f"the input mode is {mode:.20}: the program reads and writes files")
    # The parts with prompts name the language that each asks for.
    language = language_name((optional_text(row, "language") or "python").replace("cplusplus", "cpp"))
    if language not in LANGUAGES:
        raise Rejected(Reason.OTHER_LANGUAGE, f"the row asks for {language:.40}")
    checker = optional_text(row, "generated_checker")
    if checker:
        parsed_python(checker)
    tests = _cases(_whole(row.get("official_tests"), is_complete=row.get("official_tests_complete") is True))
    examples = shown(_cases(row["examples"])) if row.get("examples") else None
    problem = Problem(
        problem_id=text(row, "id"),
        prompt=codeforces_statement(row),
        tests=_judged(tests, JudgeProgram(_PRINTING.format(source=checker), "python") if checker else None),
        limits=_limits(row.get("time_limit"), row.get("memory_limit")),
        public_tests=examples,
        difficulty=optional_text(row, "rating"),
        source="codeforces",
        languages=(language,),
    )
    facts = facts_of(row, "title", "contest_name", "contest_type", "testset_size")
    if rating := optional_text(row, "rating"):
        facts["cf_rating"] = rating
    if start := row.get("contest_start"):
        facts["contest_date"] = (_EPOCH + timedelta(seconds=start)).isoformat()
    return ReferencedProblem(problem, metadata=facts, names_languages=bool(optional_text(row, "language")))


def _whole(tests: Any, *, is_complete: bool) -> list[Any]:
    """The tests that are not cut: Codeforces shows the first 400 characters of a long text, and three dots."""
    dots = "..."
    return [
        one
        for one in tests or ()
        if is_complete or not (one["input"].rstrip().endswith(dots) or one["output"].rstrip().endswith(dots))
    ]


def codeforces_statement(row: Row) -> str:
    """The whole statement. Source: NVIDIA/NeMo-Skills, recipes/opencodereasoning/scripts/prepare_questions.py."""
    parts = [text(row, "description")]
    for title, name in (("Input", "input_format"), ("Output", "output_format")):
        if found := optional_text(row, name):
            parts += [title, found]
    for number, example in enumerate(row.get("examples") or ()):
        parts += ["Examples"] if not number else []
        parts += ["Input", example["input"], "Output", example["output"]]
    if note := optional_text(row, "note"):
        parts += ["Note", note]
    return "\n\n".join(parts)


# CodeContests+ and CodeContests-O.


def read_code_contests_plus(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The part `default` has no tests."""
    checker = optional_text(row, "checker")
    problem = Problem(
        problem_id=text(row, "id"),
        prompt=text(row, "description"),
        tests=_judged(_cases(row.get("test_cases")), _cpp_checker(checker) if checker else None),
        limits=_limits(
            _number(row.get("time_limit"), "time limit", 1000 * _MOST_SECONDS) / 1000, row.get("memory_limit")
        ),
        difficulty=optional_text(row, "difficulty"),
        source="code_contests_plus",
        family=optional_text(row, "source"),
    )
    facts = facts_of(row, "title", "true_positive_rate", "true_negative_rate")
    return ReferencedProblem(problem, _programs(row.get("correct_submissions")), facts)


def read_code_contests_o(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The data set has neither limits nor solutions."""
    cases = decoded(row.get("corner_cases") or [])
    flat = [(one["input"].get("stdin") or "", one["output"].get("stdout") or "") for one in cases]
    checker = optional_text(row, "checker")
    problem = Problem(
        problem_id=text(row, "name"),
        prompt=text(row, "description"),
        tests=_judged(stdin_tests(flat), _cpp_checker(checker, _header("equal_first.h")) if checker else None),
        comparator=Comparator(ignore_case=True),
        source="code_contests_o",
    )
    return ReferencedProblem(problem)


# HardTests.


def hardtests_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    """The rows of tests with the fields of their problems, then the problems without tests."""
    number = 0
    with TemporaryDirectory() as folder, closing(sqlite3.connect(Path(folder, "problems"))) as problems:
        problems.execute("CREATE TABLE problem (pid TEXT PRIMARY KEY, row TEXT, used INTEGER DEFAULT 0)")
        for file in _files_with(path, "question_content"):
            for row in file_rows(file, 0):
                pid, is_new = _pid(row.value), False
                if pid:
                    insert = "INSERT OR IGNORE INTO problem (pid, row) VALUES (?, ?)"
                    is_new = problems.execute(insert, (pid, json.dumps(row.value, default=str))).rowcount > 0
                number += not is_new
                if not is_new and number > skip:  # it will be rejected: no tests can be joined with it
                    yield SourceRow(number, row.value, row.fault)
        for file in _files_with(path, "test_cases_kit"):
            for row in file_rows(file, 0):
                number += 1
                pid = _pid(row.value)
                problems.execute("UPDATE problem SET used = 1 WHERE pid = ?", (pid,))
                if number > skip:
                    about = problems.execute("SELECT row FROM problem WHERE pid = ?", (pid,)).fetchone()
                    joined = {**json.loads(about[0]), **row.value} if about else row.value
                    yield SourceRow(number, joined, row.fault)
        for (left,) in problems.execute("SELECT row FROM problem WHERE NOT used ORDER BY rowid"):
            number += 1
            if number > skip:
                yield SourceRow(number, json.loads(left))


def _pid(row: Any) -> str:
    return optional_text(row, "pid").encode(errors="replace").decode() if isinstance(row, dict) else ""


def _files_with(path: Path, name: str) -> list[Path]:
    """The data files in a folder whose rows have this column. Raises ProblemFileError."""
    endings = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".jsonl.zst")
    found = [file for file in sorted(path.rglob("*")) if file.name.endswith(endings) and name in column_names(file)]
    if not found:
        raise ProblemFileError(f"{path} is no folder with a file (parquet, JSON lines) that has the column {name}")
    return found


def read_hardtests(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row of tests, joined with its problem."""
    if not row.get("test_cases"):
        raise Rejected(Reason.NO_TESTS, "no row of tests belongs to this row")
    if "question_content" not in row:
        raise Rejected(Reason.MISSING_FIELD, "no problem has this pid")
    judge = optional_text(row.get("test_cases_kit") or {}, _FUNCTION)
    if judge and f"def {_FUNCTION}" not in judge:
        raise Rejected(Reason.UNREADABLE_TESTS, f"the kit has no function {_FUNCTION}")
    if judge:
        parsed_python(judge)
    tests = _cases(packed_cases(row["test_cases"]))
    examples = shown(_cases(row["public_test_cases"])) if row.get("public_test_cases") else None
    problem = Problem(
        problem_id=text(row, "pid"),
        prompt=text(row, "question_content"),
        tests=_judged(tests, JudgeProgram(_JUDGING.format(source=judge), "python") if judge else None),
        public_tests=examples,
        starter_code=optional_text(row, "starter_code"),
        source="hardtests",
        family=optional_text(row, "platform"),
    )
    # The units of the limits differ by platform, so they are not applied.
    facts = facts_of(row, "question_title", "contest_date", "time_limit", "memory_limit", "url")
    return ReferencedProblem(problem, _programs(row.get("solutions")), facts)


# LiveCodeBench Pro.

_TIME = re.compile(r"\s*([0-9.]+)\s*(ms|s)?\s*", re.IGNORECASE)
_MEMORY = re.compile(r"\s*([0-9.]+)\s*([kmg]?)b?\s*", re.IGNORECASE)
_MIB = {"": 1 / 1024**2, "k": 1 / 1024, "m": 1.0, "g": 1024.0}


def pro_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    """The rows of problems, each with the files of its archive."""
    number = 0
    archives = {file.stem: file for file in sorted(path.rglob("*.zip"))}
    for file in _files_with(path, "problem_statement"):
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
    checker = _cpp_checker(files.text(str(config.get("checker") or "chk.cc")))
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
    return _limits(max(seconds, default=1.0), max(mebibytes, default=256.0))


def _in(form: re.Pattern[str], value: Any, units: dict[str, float]) -> float:
    found = form.fullmatch(str(value))
    if found is None:
        raise Rejected(Reason.MALFORMED, f"config.yaml has the limit {value!r:.40}")
    return float(found[1]) * units[(found[2] or "").lower()]


FORMATS = {
    "codeforces": Format(read_codeforces, "open-r1's Codeforces, with checkers in Python"),
    "code_contests_plus": Format(read_code_contests_plus, "CodeContests+, with testlib checkers"),
    "code_contests_o": Format(read_code_contests_o, "CodeContests-O, with testlib checkers"),
    "hardtests": Format(read_hardtests, "HardTests: a folder with problems and tests", hardtests_rows),
    "livecodebench_pro": Format(read_livecodebench_pro, "LiveCodeBench Pro: a folder with rows and archives", pro_rows),
}
