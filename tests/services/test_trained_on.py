"""What a policy was trained on stands in its folder, and every command that measures or teaches says what is both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.command_line import nouscoder
from tests.openai_mock import MockServer, completion, serving

from nouscoder.config import load_config
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.policy_folder.compose import compose_policy
from nouscoder.policy_folder.trained_on import TRAINED_ON_FILE, joined, trained_on
from nouscoder.run.held_out import leak_lines, note_trained_on

TESTS = StdinTests((StdinCase("", "1"),))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a policy, examples and held-out problems, two of which the examples teach."""
    write_policy_folder(tmp_path / "first", random_policy(0))
    records = [
        {"problem_id": "a", "prompt": "Print 1.\n", "completion": "print(1)"},
        {"problem_id": "cut", "prompt": "Print 4.", "completion": "pri", "finish_reason": "length"},
        {"prompt": "print  2.", "completion": "print(2)"},
    ]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    held_out = [Problem(name, f"Print {name}.", TESTS) for name in "a23"]
    save_problems(tmp_path / "held.jsonl", held_out)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SAID = "warning: 2 of 3 {}problems are training problems, such as a (1 by name, 1 by text)"


def test_examples_and_the_policy_made_of_them_are_compared_with_what_measures(place: Path) -> None:
    known = ("--set", "problems.held_out=held.jsonl")
    taught = nouscoder("sft", "--model", "first", "--data", "examples.jsonl", "--name", "t", *known)
    assert taught.exit_code == 0, taught.output
    assert SAID.format("held-out ") in taught.stderr
    assert "dropped: 1 unfinished" in taught.output
    model = place / "runs" / "t-sft" / "model"
    assert len(trained_on(model)) == 2
    options = ("--policy", str(model), "--n", "1", "--max-tokens", "8", "--out", "out")
    assert SAID.format("") in nouscoder("eval", "held.jsonl", *options).stderr

    # A run that begins with it says so too, and what it writes has both.
    save_problems(place / "train.jsonl", [Problem("new", "Print 9.", TESTS)])
    config = load_config(
        None, [f"policy.path={model}", f"problems.train={place}/train.jsonl", f"problems.held_out={place}/held.jsonl"]
    )
    (line,) = leak_lines(config)
    assert line.startswith(SAID.format("held-out "))
    note_trained_on(place, config)
    compose_policy(place / "next", model, model, trained=place)
    assert trained_on(place / "next").keys() == {"a", "new", *trained_on(model)}
    (place / "first" / TRAINED_ON_FILE).write_text("[]")
    refused = nouscoder("eval", "held.jsonl", "--policy", "first", *options[2:])
    assert refused.exit_code == 78
    assert f"{TRAINED_ON_FILE} cannot be read" in refused.output


def test_two_files_may_have_the_same_names() -> None:
    """Imports name rows by their places, so taco-1 of two files is two problems."""
    first = joined({}, {"taco-1": "a", "sum": "b"})
    assert {*joined(first, {"taco-1": "c", "sum": "b"}).values()} == {"a", "b", "c"}
    assert joined(first, first) == first


def test_problems_that_a_teacher_is_asked_are_compared_with_what_measures(place: Path) -> None:
    with serving(MockServer(lambda _: completion("print(1)"))) as server:
        options = ("--url", server.url, "--model", "m", "--n", "1", "--out", "taught.jsonl")
        said = nouscoder("sft", "sample", "held.jsonl", *options, "--set", "problems.held_out=held.jsonl")
        assert "3 of 3 held-out problems are training problems, such as a (3 by name, 3 by text)" in said.stderr
        again = nouscoder("sft", "sample", "held.jsonl", *options[:-1], "other.jsonl")
        assert "warning" not in again.stderr, "no held-out problems are known"
