"""A library that candidates lack is said by inspect, init, train, eval and grade before they work on its problems."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from tests.command_line import nouscoder
from tests.services.test_preflight import Home

from nouscoder.config import load_config
from nouscoder.data.problem_index import open_index
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.errors import Unusable
from nouscoder.rpc.channel import PeerRefused
from nouscoder.rpc.verifier_client import VerifierClient
from nouscoder.run.languages import require_languages

TESTS = StdinTests((StdinCase("1", "1"),))
NEEDS = [("no_lib_a",), ("json", "no_lib_b"), ("json",), ()]
SAID = "2 of 4 problems need no_lib_a, no_lib_b, which candidates cannot import"


def written(folder: Path) -> Path:
    file = folder / "libraries.jsonl"
    problems = [Problem(f"p{n}", f"Print {n}.", TESTS, libraries=own) for n, own in enumerate(NEEDS)]
    save_problems(file, problems)
    return file


def test_inspect_init_and_train_say_it_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They said nothing: each answer was an internal error without a reward."""
    home, file = Home(tmp_path), written(tmp_path)
    monkeypatch.chdir(tmp_path)
    sets = ["--set", f'problems.train="{file}"', "--set", "problems.held_out_share=0.3"]
    commands = [
        ("data", "inspect", str(file)),
        ("init", "--out", "own.toml", "model", str(file)),
        ("train", str(home.toml()), *sets),
    ]
    for command in commands:
        answer = nouscoder(*command)
        assert answer.exit_code != 0
        assert SAID in answer.output, answer.output
    assert SAID in json.loads(nouscoder("data", "inspect", str(file), "--json").stdout)["faults"][0]
    assert not (tmp_path / "runs").exists()


def test_a_missing_library_hides_no_other_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, file = Home(tmp_path), written(tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    wrong: list[dict[str, object]] = [{"libraries": ["a b"]}, {"prompt_template": "Write a program."}]
    lines += [{**lines[3], "problem_id": f"wrong{n}", **one} for n, one in enumerate(wrong)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sets = ["--set", f'problems.train="{file}"', "--set", "problems.held_out_share=0.3"]
    for command in (
        ("data", "inspect", str(file)),
        ("init", "--out", "own.toml", "model", str(file)),
        ("train", str(home.toml()), *sets),
    ):
        answer = nouscoder(*command)
        assert answer.exit_code == 78
        assert "2 of 6 problems need no_lib_a, no_lib_b, which" in answer.output
        assert "2 of 6 problems cannot be graded" in answer.output
        assert "wrong0: libraries: 'a b' is no name of a module" in answer.output
        assert "prompt_template: has no {prompt}, so nobody would read the prompt" in answer.output


def test_eval_and_grade_say_it_before_anything_is_sampled(tmp_path: Path) -> None:
    file, samples = written(tmp_path), tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"task_id": f"p{n}", "solution": "print(1)"}) + "\n" for n in range(4)))
    answer = nouscoder("eval", file, "--samples", samples, "--out", tmp_path / "out")
    assert answer.exit_code != 0
    assert SAID in answer.output
    answer = nouscoder("grade", samples, "--problems", file)
    assert f"warning: {file}: {SAID}" in answer.stderr
    assert '"accepted"' in answer.stdout  # of p2 and p3


async def test_a_run_asks_its_verifier_whose_candidates_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods, Modal and external verifiers: what their candidates can import is known to them alone."""
    asked = []

    async def languages(_: VerifierClient) -> frozenset[str]:
        return frozenset({"python"})

    async def grade(_: VerifierClient, submission: Submission) -> None:
        asked.append(submission.libraries)
        raise PeerRefused("verifier at x: libraries: candidates here cannot import no_lib_b (verifier.libraries)")

    monkeypatch.setattr(VerifierClient, "languages", languages)
    monkeypatch.setattr(VerifierClient, "grade", grade)
    file = written(tmp_path)
    save_problems(tmp_path / "held.jsonl", [Problem("held", "Print.", TESTS)])
    config = load_config(None, [f"problems.train={file}", f"problems.held_out={tmp_path}/held.jsonl"])
    with closing(open_index(config)) as index:
        assert index.libraries() == {"p0": "no_lib_a", "p1": "json,no_lib_b", "p2": "json"}
    with pytest.raises(Unusable, match="1 of 4 training problems need no_lib_b, which"):
        await require_languages(config)
    assert asked == [("json", "no_lib_a", "no_lib_b")]
