"""HardTests: a folder with the files of sigcp/hardtests_problems and of sigcp/hardtests_tests, joined by pid.

The problems have pid, question_content, solutions, ...; the tests have pid, test_cases (base64 of zlib of a pickle of
JSON) and test_cases_kit. `output_judging_function(input, output, answer)` in the kit is Python, or null for the plain
comparison. The rows of one part are on the disk, and in memory is one row of each.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nouscoder.data.importers.checkers import cases_of, judged, programs
from nouscoder.data.importers.fields import Reason, Rejected, Row, facts_of, optional_text, parsed_python, shown, text
from nouscoder.data.importers.livecodebench import packed_cases
from nouscoder.data.importers.rows import Format, file_rows, files_with
from nouscoder.data.json_records import SourceRow
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import JudgeProgram

_FUNCTION = "output_judging_function"
_JUDGING = """import sys
given, output, answer = (open(name, encoding="utf8", errors="replace").read() for name in sys.argv[1:4])
names = {{"__name__": "judge"}}
exec(compile({source!r}, "judge.py", "exec"), names)
sys.exit(0 if names["output_judging_function"](given, output, answer) else 1)
"""


def hardtests_rows(path: Path, skip: int) -> Iterator[SourceRow]:
    """The rows of tests with the fields of their problems, then the problems without tests."""
    number = 0
    with TemporaryDirectory() as folder, closing(sqlite3.connect(Path(folder, "problems"))) as problems:
        problems.execute("CREATE TABLE problem (pid TEXT PRIMARY KEY, row TEXT, used INTEGER DEFAULT 0)")
        for file in files_with(path, "question_content"):
            for row in file_rows(file, 0):
                pid, is_new = _pid(row.value), False
                if pid:
                    insert = "INSERT OR IGNORE INTO problem (pid, row) VALUES (?, ?)"
                    is_new = problems.execute(insert, (pid, json.dumps(row.value, default=str))).rowcount > 0
                number += not is_new
                if not is_new and number > skip:  # it will be rejected: no tests can be joined with it
                    yield SourceRow(number, row.value, row.fault)
        for file in files_with(path, "test_cases_kit"):
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
    tests = cases_of(packed_cases(row["test_cases"]))
    examples = shown(cases_of(row["public_test_cases"])) if row.get("public_test_cases") else None
    problem = Problem(
        problem_id=text(row, "pid"),
        prompt=text(row, "question_content"),
        tests=judged(tests, JudgeProgram(_JUDGING.format(source=judge), "python") if judge else None),
        public_tests=examples,
        starter_code=optional_text(row, "starter_code"),
        source="hardtests",
        family=optional_text(row, "platform"),
    )
    # The units of the limits differ by platform, so they are not applied.
    facts = facts_of(row, "question_title", "contest_date", "time_limit", "memory_limit", "url")
    return ReferencedProblem(problem, programs(row.get("solutions")), facts)


FORMATS = {"hardtests": Format(read_hardtests, "HardTests: a folder with problems and tests", hardtests_rows)}
