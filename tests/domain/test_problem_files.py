"""Problem files: what is written is read again, and a fault is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from nouscoder.data.problems import ProblemFileError, load_problems, save_problems
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
    StdinCase,
    StdinTests,
)

STDIN = Problem(
    problem_id="a",
    prompt="two\u2028lines\x85or\nthree",
    tests=StdinTests((StdinCase("1\n", "2\n"),)),
    limits=Limits(wall_time_s=2),
    comparator=Comparator(ComparatorKind.EXACT),
    text_is_code=True,
    family="sums",
)
CALL = Problem("b", "call", CallTests("f", (CallCase((1, [2, None]), {"k": "v"}, {"x": 1.5}),)))
JUDGE = JudgeProgram("int main(){}", "c")
OTHERS = [
    Problem("c", "assert", AssertTests(("assert f(1)",), "import math")),
    Problem("d", "checker", CheckerTests((StdinCase("1", "2"),), JUDGE)),
    Problem("e", "interactive", InteractiveTests((StdinCase("1", ""),), JUDGE)),
    Problem("f", "math", MathTests((MathCase("1/2"),)), comparator=Comparator(absolute_tolerance=0.5)),
]


def test_problems_survive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "problems.jsonl"
    save_problems(file, [STDIN, CALL, *OTHERS])
    assert load_problems(file) == [STDIN, CALL, *OTHERS]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no problem"),
        ("{}\n", "line 1: KeyError: 'problem_id'"),
        ('{"problem_id": "a", "prompt": "", "tests": {"type": "magic"}}\n', "line 1: .*'magic' is none of stdin, call"),
        ("not json\n", "line 1: JSONDecodeError"),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(text)
    with pytest.raises(ProblemFileError, match=sentence):
        load_problems(file)


def test_a_problem_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    save_problems(file, [STDIN, STDIN])
    with pytest.raises(ProblemFileError, match="line 2: problem_id 'a' is there twice"):
        load_problems(file)
