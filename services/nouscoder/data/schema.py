"""`nouscoder data schema`: the problem format as JSON Schema, with an example for each type of tests."""

from __future__ import annotations

from typing import Any

from nouscoder.data.problems import ProblemBody

_CHECKER = """import sys

given, output, answer = (open(name).read().split() for name in sys.argv[1:4])
sys.exit(0 if sum(map(int, output)) == int(given[0]) else 1)  # testlib's exit codes: 0 right, 1 wrong
"""
_INTERACTOR = """import sys

secret = int(open(sys.argv[1]).read())  # the arguments: input, output, answer
for _ in range(20):
    guess = int(input())
    print("right" if guess == secret else "larger" if secret > guess else "smaller", flush=True)
    if guess == secret:
        sys.exit(0)
sys.exit(1)
"""
EXAMPLES: list[dict[str, Any]] = [
    {
        "problem_id": "sum",
        "prompt": "Read two integers from standard input and print their sum.",
        "tests": {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}]},
        "limits": {"wall_time_s": 5},
        "difficulty": "easy",
        "references": ["print(sum(map(int, input().split())))"],
    },
    {
        "problem_id": "two-sum",
        "prompt": "Write twoSum(nums, target) that returns the indices of the two numbers whose sum is target.",
        "tests": {
            "type": "call",
            "entry_point": "twoSum",
            "cases": [
                {"args": [[2, 7, 11], 9], "expected": [0, 1]},
                {"kwargs": {"nums": [3, 3], "target": 6}, "expected": [0, 1]},
            ],
        },
        "prelude": "lcb",
    },
    {
        "problem_id": "double",
        "prompt": "Write double(x).",
        "tests": {
            "type": "assert",
            "setup": "import math",
            "cases": ["assert double(2) == 4", "assert math.isnan(double(math.nan))"],
        },
    },
    {
        "problem_id": "split",
        "prompt": "Read n and print two integers whose sum is n.",
        "tests": {
            "type": "checker",
            "checker": {"language": "python", "code": _CHECKER},
            "cases": [{"input": "7\n"}],
        },
    },
    {
        "problem_id": "guess",
        "prompt": "Guess an integer from 1 to 1000. Print a guess; read larger, smaller or right.",
        "tests": {
            "type": "interactive",
            "interactor": {"language": "python", "code": _INTERACTOR},
            "cases": [{"input": "417\n"}],
        },
    },
    {
        "problem_id": "half",
        "prompt": "What is one half of one half? Put the answer in a box.",
        "tests": {"type": "math", "cases": [{"expected": "\\frac{1}{4}"}]},
    },
]


def problem_schema() -> dict[str, Any]:
    """The JSON Schema of one line of a problem file."""
    schema = ProblemBody.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "A problem",
        "description": "One line of a problem file (JSON lines: .jsonl, .jsonl.gz, .jsonl.zst).",
        "examples": EXAMPLES,
    }
