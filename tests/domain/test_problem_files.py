"""Problem files: problems are read as they were written, and a fault is named with its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nouscoder.data.problem_parquet import load_problems
from nouscoder.data.problems import ProblemFileError, save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    Comparator,
    ComparatorKind,
    InteractiveTests,
    JudgeProgram,
    Limits,
    MathCase,
    MathTests,
    Prelude,
    Profile,
    StdinCase,
    StdinTests,
    Submission,
    Tests,
    TestsReference,
)
from nouscoder.verifier.api.schema import parse_submission, request_of

STDIN = Problem(
    problem_id="a",
    prompt="two\u2028lines\x85or\nthree",
    tests=StdinTests((StdinCase("1\n", "2\n"),)),
    limits=Limits(wall_time_s=2),
    comparator=Comparator(ComparatorKind.EXACT),
    text_is_code=True,
    family="sums",
    prompt_template="Solve: {prompt}",
    difficulty="easy",
    source="made up",
    languages=("cpp",),
)
CALL = Problem(
    "b",
    "call",
    CallTests("f", (CallCase((1, [2, None]), {"k": "v"}, {"x": 1.5}),)),
    prelude=Prelude.LCB,
    profile=Profile.LCB,
    starter_code="def f(a, b):",
)
DIGEST = f"sha256:{0:064}"
JUDGE = JudgeProgram("int main(){}", "c")
OTHERS = [
    Problem("c", "assert", AssertTests(("assert f(1)",), "import math")),
    Problem("d", "checker", CheckerTests((StdinCase("1", "2"),), JUDGE), languages=("cpp", "rust")),
    Problem("e", "interactive", InteractiveTests((StdinCase("1", ""),), JUDGE)),
    Problem("f", "math", MathTests((MathCase("1/2"),)), comparator=Comparator(absolute_tolerance=0.5)),
]


@pytest.mark.parametrize("name", ["problems.jsonl", "problems.jsonl.zst", "problems.jsonl.gz"])
def test_problems_are_read_as_written(tmp_path: Path, name: str) -> None:
    file = tmp_path / "deep" / name
    save_problems(file, [STDIN, CALL, *OTHERS])
    assert load_problems(file) == [STDIN, CALL, *OTHERS]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no problem"),
        ("{}\n", "line 1: problem_id is missing; prompt is missing; tests is missing"),
        (
            '{"problem_id": "a", "prompt": "", "tests": {"type": "magic"}}\n',
            r"line 1: tests\.type: 'magic' is none of stdin, call",
        ),
        ("not json\n", "line 1: not JSON"),
        (
            '{"problem_id": "a", "promt": "", "tests": {"type": "math", "cases": [{"expected": "1"}]}}\n',
            r"line 1: prompt is missing; promt: unknown field: did you mean prompt\?",
        ),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(text)
    with pytest.raises(ProblemFileError, match=sentence):
        load_problems(file)


def test_a_duplicate_problem_id_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    save_problems(file, [STDIN, STDIN])
    with pytest.raises(ProblemFileError, match="line 2: problem_id 'a' occurs twice"):
        load_problems(file)


@pytest.mark.parametrize("tests", [problem.tests for problem in (STDIN, CALL, *OTHERS)] + [TestsReference(DIGEST)])
def test_a_request_is_parsed_to_the_submission_that_it_was_made_of(tests: Tests | TestsReference) -> None:
    limits = Limits(1.5, 2.5, 1 << 20, 1 << 10, 3)
    rules = {"limits": limits, "comparator": Comparator(ComparatorKind.LINES, 0.1, 0.2, 0.3), "problem_id": "p"}
    others = {"stop_on_first_failure": False, "reveal": False, "profile": Profile.LCB, "prelude": Prelude.LCB}
    answer = Submission(tests, completion="```python\nprint(1)\n```", language="cpp", **rules, **others)  # type: ignore[arg-type]
    for submission in (Submission(tests, "print(1)"), replace(answer, other_languages=("r",))):
        assert parse_submission(json.dumps(request_of(submission))) == submission


def test_problem_files_and_the_api_have_the_same_form_of_tests(tmp_path: Path) -> None:
    """The tests of a problem file are a valid part of a request to the grading API."""
    file = tmp_path / "problems.jsonl"
    save_problems(file, [STDIN, CALL, *OTHERS])
    for line, problem in zip(file.read_text(encoding="utf8").split("\n"), [STDIN, CALL, *OTHERS], strict=False):
        record = json.loads(line)
        fields = ("tests", "comparator", "limits", "prelude", "profile")
        source = {"code": "x", "language": record["languages"][0]}
        submission = parse_submission(json.dumps(source | {name: record[name] for name in fields}))
        expected = replace(problem, text_is_code=True).grading_rules().submission(problem.tests, "x")
        assert submission == replace(expected, reveal=True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"languages": ["C++17", "brainfuck"]}, "'brainfuck' is no language that the verifier knows: bash, c, cpp"),
        ({"languages": ["cpp"], "profile": "lcb"}, "the profile lcb grades only python"),
        ({"languages": ["cpp", "go"], "text_is_code": True}, "text_is_code needs one language"),
        (
            {
                "languages": ["cpp", "go"],
                "tests": {"type": "call", "entry_point": "f", "cases": [{"args": [], "expected": 1}]},
            },
            "call tests need programs in python: in cpp, go only whole programs are tested",
        ),
        (
            {"languages": ["js", "cpp"], "tests": {"type": "assert", "cases": ["f()"]}},
            "assert tests are in one language, not in javascript, cpp",
        ),
    ],
)
def test_tests_that_cannot_be_run_in_the_languages_of_a_problem_are_refused(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    """Each answer to such a problem would be an internal_error."""
    problem = {"problem_id": "a", "prompt": "?", "tests": {"type": "stdin", "cases": [{"input": "", "output": "1"}]}}
    (tmp_path / "problems.jsonl").write_text(json.dumps(problem | fields) + "\n")
    with pytest.raises(ProblemFileError, match=f"line 1: languages: {says}"):
        load_problems(tmp_path / "problems.jsonl")


@pytest.mark.parametrize("suffix", ["zst", "gz"])
def test_a_compressed_file_that_is_cut_off_is_named(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"problems.jsonl.{suffix}"
    save_problems(file, [STDIN] * 1)
    whole = file.read_bytes()
    for broken in (b"not compressed at all", whole[: len(whole) // 2]):
        file.write_bytes(broken)
        with pytest.raises(ProblemFileError, match=rf"problems\.jsonl\.{suffix}"):
            load_problems(file)


@pytest.mark.parametrize("text_is_code", [True, False])
def test_a_completion_is_code_or_an_answer_that_contains_code(text_is_code: bool) -> None:
    problem = replace(CALL, text_is_code=text_is_code)
    submission = replace(problem.grading_rules(), run_all_tests=True).submission(
        problem.tests, "text", problem.problem_id
    )
    assert (submission.code, submission.completion) == (("text", None) if text_is_code else (None, "text"))
    assert (submission.stop_on_first_failure, submission.reveal, submission.problem_id) == (False, False, "b")
    assert (submission.prelude, submission.profile) == (Prelude.LCB, Profile.LCB)
