"""The adapters with the real packages of trainers, in environments of their own: make test-trainers."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.domain.test_docs_trainers import documented_packages

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "trainer_packages"
pytestmark = pytest.mark.trainers


@functools.cache
def told_versions(python: Path) -> None:
    """Print what the environment has of the packages of docs/trainers.md."""
    names = [name for name, _ in documented_packages()]
    script = (
        "import sys; from importlib.metadata import distributions as all;"
        "print(*sorted(f'{d.name} {d.version}' for d in all() if d.name in sys.argv[1:]), sep=', ')"
    )
    subprocess.run([str(python), "-c", script, *names], check=True)


def output_of(script: str, *arguments: str, venv: str = ".venv-trainers") -> Any:
    """The last line that the script prints, as JSON. The test fails without the environment."""
    python = ROOT / venv / "bin" / "python"
    assert python.exists(), f"{python} is missing: run make test-trainers"
    told_versions(python)
    command = [str(python), str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_grpo_trainer_learns_from_our_rewards_and_leaves_out_what_has_none(grading_url: str, kind: str) -> None:
    """Two steps of TRL: each advantage is that of rewards 1 and -1, and 0 for a completion that nobody graded."""
    trained = output_of("trl_steps.py", grading_url, kind)
    rewards = {"right": 1.0, "wrong": -1.0, "other": -1.0}  # "other" is a completion without a program
    size, completions = trained["group"], trained["completions"]
    names = {name for name, _ in completions}
    assert {"right", "wrong", "lost"} <= names
    assert len(trained["steps"]) == 2
    assert all(gradient_norm > 0 for _, gradient_norm in trained["steps"])
    for start in range(0, len(completions), size):
        group = completions[start : start + size]
        graded = [rewards[name] for name, _ in group if name in rewards]
        mean, deviation = statistics.mean(graded), statistics.stdev(graded)
        for name, advantage in group:
            expected = 0.0 if name == "lost" else (rewards[name] - mean) / (deviation + 1e-4)
            assert advantage == pytest.approx(expected, abs=1e-3), name
    for number, (mean, _) in enumerate(trained["steps"]):
        step = [rewards[name] for name, _ in completions[2 * size * number :][: 2 * size] if name in rewards]
        assert mean == pytest.approx(statistics.mean(step), abs=1e-3)


def test_verl_scores_40_right_programs_at_once_with_a_queue_of_two(small_queue_url: str) -> None:
    score = output_of("verl_fusion.py", small_queue_url)
    print(f"verl's score of 40 right programs with a queue of two: {score}")
    assert score == 1.0


def test_verls_reward_managers_and_its_own_grading_give_the_right_scores(grading_url: str) -> None:
    assert output_of("verl_rewards.py", grading_url) == {
        "manager": [1.0, 0.0],
        "loop": [1.0, 0.0],
        "fusion": [1.0, 0.0, 0.5],
        "no_verdict": "Unreachable",
    }


def test_a_task_of_verifiers_gives_1_and_0_and_an_error_without_a_verdict(grading_url: str) -> None:
    assert output_of("verifiers_task.py", grading_url) == [[1.0, ""], [0.0, ""], [None, "Unreachable"]]


def test_a_trainer_gets_batches_of_atropos_without_groups_that_nobody_graded(grading_url: str) -> None:
    found = output_of("atropos_batch.py", grading_url)
    assert found["groups"] == [[1.0, -1.0], [1.0, -1.0]]
    assert found["lost"] >= 1


def test_openrlhf_takes_rewards_of_its_remote_url_and_sends_again_what_is_refused(grading_url: str) -> None:
    assert output_of("openrlhf_rewards.py", grading_url) == {
        "right": [[1.0], [1.0], {"accepted": [1.0]}],
        "wrong": [[-1.0], [0.0], {"accepted": [0.0]}],
        "none": None,
        "tries": 5,
    }


needs_312 = pytest.mark.skipif(
    bool(os.environ.get("NOUSCODER_WITHOUT_312")), reason="no Python 3.12: make test-trainers PYTHON_312=..."
)


@needs_312
def test_miles_takes_rewards_of_its_remote_url_and_leaves_out_groups_without_a_verdict(grading_url: str) -> None:
    """Its rollout asks for 3 groups; each second one gets a 503."""
    found = output_of("miles_rewards.py", grading_url, venv=".venv-skyrl-miles")
    assert found == {"accepted": [1.0, 0.0] * 3, "reward": [1.0, -1.0] * 3, "asked": 5, "kept": 3}


@needs_312
def test_the_documented_environment_of_skyrl_gives_1_and_0_and_ends_without_a_verdict(grading_url: str) -> None:
    found = output_of("skyrl_env.py", grading_url, venv=".venv-skyrl-miles")
    assert found == {"right": 1.0, "wrong": 0.0, "lost": "Unreachable"}


@needs_312
def test_a_resources_server_of_nemo_gym_gives_1_and_0_and_fails_without_a_verdict(grading_url: str) -> None:
    found = output_of("nemo_gym_server.py", grading_url, venv=".venv-nemo-gym")
    assert found == [[200, 1.0], [200, 0.0], [500, None]]
