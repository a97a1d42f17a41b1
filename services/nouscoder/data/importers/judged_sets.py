"""Sets whose outputs a checker judges: Codeforces, CodeContests+, CodeContests-O.

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

INVARIANT: no program of a data set runs during an import; checkers run in the verifier's sandbox.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from nouscoder.data.importers.checkers import (
    MOST_SECONDS,
    cases_of,
    cpp_checker,
    header,
    judged,
    limits_of,
    positive,
    programs,
)
from nouscoder.data.importers.fields import (
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
from nouscoder.data.importers.rows import Format
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import LANGUAGES, Comparator, JudgeProgram, language_name

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
    tests = cases_of(_whole(row.get("official_tests"), is_complete=row.get("official_tests_complete") is True))
    examples = shown(cases_of(row["examples"])) if row.get("examples") else None
    problem = Problem(
        problem_id=text(row, "id"),
        prompt=codeforces_statement(row),
        tests=judged(tests, JudgeProgram(_PRINTING.format(source=checker), "python") if checker else None),
        limits=limits_of(row.get("time_limit"), row.get("memory_limit")),
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


def read_code_contests_plus(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The part `default` has no tests."""
    checker = optional_text(row, "checker")
    problem = Problem(
        problem_id=text(row, "id"),
        prompt=text(row, "description"),
        tests=judged(cases_of(row.get("test_cases")), cpp_checker(checker) if checker else None),
        limits=limits_of(
            positive(row.get("time_limit"), "time limit", 1000 * MOST_SECONDS) / 1000, row.get("memory_limit")
        ),
        difficulty=optional_text(row, "difficulty"),
        source="code_contests_plus",
        family=optional_text(row, "source"),
    )
    facts = facts_of(row, "title", "true_positive_rate", "true_negative_rate")
    return ReferencedProblem(problem, programs(row.get("correct_submissions")), facts)


def read_code_contests_o(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The data set has neither limits nor solutions."""
    cases = decoded(row.get("corner_cases") or [])
    flat = [(one["input"].get("stdin") or "", one["output"].get("stdout") or "") for one in cases]
    checker = optional_text(row, "checker")
    problem = Problem(
        problem_id=text(row, "name"),
        prompt=text(row, "description"),
        tests=judged(stdin_tests(flat), cpp_checker(checker, header("equal_first.h")) if checker else None),
        comparator=Comparator(ignore_case=True),
        source="code_contests_o",
    )
    return ReferencedProblem(problem)


FORMATS = {
    "codeforces": Format(read_codeforces, "open-r1's Codeforces, with checkers in Python"),
    "code_contests_plus": Format(read_code_contests_plus, "CodeContests+, with testlib checkers"),
    "code_contests_o": Format(read_code_contests_o, "CodeContests-O, with testlib checkers"),
}
