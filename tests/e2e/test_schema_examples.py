"""The examples of `nouscoder data schema` are graded by real sandboxes: a right answer passes, a wrong one does not."""

from __future__ import annotations

import json
from pathlib import Path

from nouscoder.config import load_config
from nouscoder.data.problems import EXAMPLES
from nouscoder.grade_files.grade_file import FileRequest, grade_file

_GUESS = """low, high = 1, 1000
while True:
    guess = (low + high) // 2
    print(guess, flush=True)
    answer = input()
    if answer == "right":
        break
    low, high = (guess + 1, high) if answer == "larger" else (low, guess - 1)
"""
RIGHT = {
    "sum": "print(sum(map(int, input().split())))",
    "two-sum": "class Solution:\n    def twoSum(self, nums, target):\n        seen = {}\n"
    "        for at, n in enumerate(nums):\n            if target - n in seen: return [seen[target - n], at]\n"
    "            seen[n] = at",
    "double": "def double(x): return 2 * x",
    "split": "print(3, int(input()) - 3)",
    "guess": _GUESS,
    "half": "The answer is \\boxed{0.25}.",
}
WRONG = {
    "sum": "print(0)",
    "two-sum": "def twoSum(nums, target): return [1, 1]",
    "double": "def double(x): return x",
    "split": "print(1, 1)",
    "guess": "print(1, flush=True)\ninput()",
    "half": "The answer is \\boxed{0.5}.",
}


def test_a_right_answer_to_each_example_passes_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    problems, samples = tmp_path / "problems.jsonl", tmp_path / "samples.jsonl"
    problems.write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    rows = [{"task_id": name, "code": code} for answers in (RIGHT, WRONG) for name, code in answers.items()]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    summary, code = grade_file(FileRequest(samples, out, problems), load_config(None))
    verdicts = [json.loads(line)["verdict"] for line in out.read_text().splitlines()]
    assert verdicts[: len(RIGHT)] == ["accepted"] * len(RIGHT), out.read_text()
    assert "accepted" not in verdicts[len(RIGHT) :]
    assert code == 0
    assert summary.pass_at_k == {1: 0.5, 2: 1.0}
