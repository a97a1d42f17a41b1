"""`nouscoder sft sample`: a teacher's answers over real HTTP, verified in real sandboxes, become examples."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.e2e.test_eval import NUM_RIGHT, NUM_SAMPLES, mixed, write_problems
from tests.openai_mock import MockServer, serving
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.sft.records import example_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]  # on a busy machine


def test_every_answer_of_the_teacher_is_an_example_with_its_verdict(tmp_path: Path) -> None:
    problems, out = write_problems(tmp_path / "problems.jsonl"), tmp_path / "examples.jsonl"
    with serving(MockServer(mixed)) as server:
        command = ["sft", "sample", str(problems), "--url", server.url, "--model", "teacher", "--n", str(NUM_SAMPLES)]
        answer = CliRunner().invoke(app, [*command, "--out", str(out), "--json"])
        assert answer.exit_code == 0, answer.output
        asked = len(server.requests)
        again = CliRunner().invoke(app, [*command, "--out", str(out), "--json"])
        assert again.stdout == answer.stdout
        assert len(server.requests) == asked, "nothing is asked for twice"
    counts = json.loads(answer.stdout.strip().splitlines()[-1])
    right = sum(NUM_RIGHT.values())
    assert counts == {
        "file": str(out),
        "problems": len(NUM_RIGHT),
        "solved": sum(count > 0 for count in NUM_RIGHT.values()),
        "examples": NUM_SAMPLES * len(NUM_RIGHT),
        "accepted": right,
    }
    examples = [example_of(json.loads(line)) for line in out.read_text().splitlines()]
    accepted = Counter(example.record.problem_id for example in examples if example.accepted)
    assert accepted == {name: count for name, count in NUM_RIGHT.items() if count}
    first = next(example for example in examples if example.record.problem_id == "p1" and example.accepted)
    assert first.record.prompt == "Print p1"
    assert first.turns[0].text == "<think>\nLet me think.\n</think>\n\nHere:\n```python\nprint('p1')\n```\n"
