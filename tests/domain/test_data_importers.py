"""The importers read the formats of the two real data sets and refuse other input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from nouscoder.data.code_contests import read_code_contests
from nouscoder.data.leetcode import call_cases, read_leetcode
from nouscoder.data.problems import ProblemFileError
from nouscoder.domain.submission import CallCase, CallTests, StdinCase, StdinTests


def test_asserts_become_call_cases() -> None:
    first, second = "assert candidate(a = [1, -2], b = 'x') == [True, None]", "assert candidate(3) == 2.5"
    check = f"def check(candidate):\n    {first}\n    {second}"
    assert list(call_cases(check)) == [
        CallCase((), {"a": [1, -2], "b": "x"}, [True, None]),
        CallCase((3,), {}, 2.5),
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "assert candidate(1)",
        "assert other(1) == 2",
        "candidate(1)",
        "assert candidate(1) != 2",
        "assert candidate(x) == 2",
    ],
)
def test_other_statements_are_refused(statement: str) -> None:
    with pytest.raises(ValueError, match=r"not of the form|malformed"):
        list(call_cases(f"def check(candidate):\n    {statement}"))


def test_a_leetcode_line_becomes_a_problem_with_its_reference_solution(tmp_path: Path) -> None:
    record = {
        "task_id": "one",
        "query": "Return a.",
        "prompt": "import math",
        "completion": "class Solution:\n    def f(self, a): return a",
        "entry_point": "Solution().f",
        "test": "def check(candidate):\n    assert candidate(a = 1) == 1",
    }
    path = tmp_path / "leetcode.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    (item,) = read_leetcode(path)
    assert item.problem.tests == CallTests("f", (CallCase((), {"a": 1}, 1),))
    assert item.program.startswith("import math\nclass Solution")


def test_a_code_contests_entry_becomes_a_stdin_problem(tmp_path: Path) -> None:
    path = tmp_path / "contests.json.gz"
    path.write_bytes(
        gzip.compress(json.dumps([{"problem": "Add.", "tests": {"inputs": ["1 2"], "outputs": ["3"]}}]).encode())
    )
    (problem,) = read_code_contests(path)
    assert problem.tests == StdinTests((StdinCase("1 2", "3"),))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "contests.json.gz"
    path.write_bytes(gzip.compress(b'[{"problem": "x", "tests": {"inputs": ["1"], "outputs": []}}]'))
    with pytest.raises(ProblemFileError, match="entry 0"):
        read_code_contests(path)
    with pytest.raises(ProblemFileError, match="cannot be read"):
        read_leetcode(tmp_path / "absent.gz")
