"""The adapters with the real packages of trainers, in an environment of their own: make test-trainers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "trainer_packages"
pytestmark = pytest.mark.trainers


def output_of(script: str, url: str) -> str:
    """The last line that the script prints. The test is skipped without the environment."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: run make test-trainers")
    command = [str(PYTHON), str(SCRIPTS / script), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_verl_scores_40_right_programs_at_once_with_a_queue_of_two(small_queue_url: str) -> None:
    score = float(output_of("verl_fusion.py", small_queue_url))
    print(f"verl's score of 40 right programs with a queue of two: {score}")
    assert score == 1.0


def test_a_rubric_of_verifiers_gives_1_and_0_and_an_error_without_a_verdict(grading_url: str) -> None:
    assert json.loads(output_of("rubric_rewards.py", grading_url)) == [[1.0, False], [0.0, False], [0.0, True]]
