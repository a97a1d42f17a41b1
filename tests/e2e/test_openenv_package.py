"""OpenEnv's own client and validator, and TRL's environment_factory, against the real service: make test-trainers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.e2e.conftest import PROBLEM, serving
from tests.e2e.test_trainer_packages import output_of

from nouscoder.data.problem_index import open_index_of

pytestmark = pytest.mark.trainers
LOST = {
    "problem_id": "lost",
    "prompt": "Add them again.",
    "tests": {"type": "stdin", "cases": [{"input": "5 6\n", "output": "11\n"}]},
}


@pytest.fixture(scope="module")
def openenv_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The service with two problems, of which the hidden tests of the second are lost."""
    folder = tmp_path_factory.mktemp("openenv")
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (PROBLEM, LOST)))
    with closing(open_index_of(file)) as index:
        digits = index.problem("lost").tests_digest.removeprefix("sha256:")
    (Path(f"{file}.index") / "tests" / digits[:2] / digits).unlink()
    with serving(folder, f"verifier.problems={file}") as url:
        yield f"{url}/openenv"


def test_openenv_validates_the_service_and_plays_32_episodes_at_once(openenv_url: str) -> None:
    found = output_of("openenv_play.py", openenv_url, venv=".venv-openenv")
    assert len(found["validate"]) == 6
    assert all(found["validate"].values())
    for number, (begun, failed, right) in enumerate(found["episodes"]):
        assert begun == [None, False, "Read two integers and print their sum."]
        output = f"Output:\n{-1 - number}\n"
        assert failed[:2] == [0.0, False]
        assert output in failed[2]
        assert right == [1.0, True, ""]
    assert "the tests of lost cannot be read" in found["lost"]
    assert "EXECUTION_ERROR" in found["lost"]
    assert "problem: unknown field (code: VALIDATION_ERROR)" in found["refused"]
    print(f"openenv {found['version']}: validate PASS 6 of 6, 32 episodes at once in {found['seconds']:.1f} s")


def test_trl_trains_in_the_environment_and_a_failure_of_the_service_is_no_reward(openenv_url: str) -> None:
    """Rollouts of the problem with lost tests have no reward and the advantage 0. The others have 0 and 1."""
    found = output_of("trl_openenv.py", openenv_url, venv=".venv-openenv")
    assert len(found["steps"]) == 2
    assert all(gradient_norm > 0 for gradient_norm in found["steps"])
    graded = {reward for problem, reward, _ in found["rollouts"] if problem == 0}
    lost = {(reward, advantage) for problem, reward, advantage in found["rollouts"] if problem == 1}
    assert (graded, lost) == ({0.0, 1.0}, {(None, 0.0)})
    print(f"trl {found['version']}: 2 steps of {len(found['rollouts'])} rollouts, gradient norms {found['steps']}")
