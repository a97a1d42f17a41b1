"""A learner in a separate process is killed with SIGKILL at each point of a batch, and started again.

docs/design/resume-and-kills.md lists these points.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nouscoder.atomic_files import numbered

Train = Callable[[Path, str], int]
_SCRIPT = Path(__file__).with_name("learner_process.py")

# The point of the kill, and the steps of the complete checkpoints at the restart. A checkpoint is due after batches 1
# and 3, that is steps 4 and 8; the last is written at the end of the run. None: it depends on the speed of the disk
# whether the checkpoint is complete.
MOMENTS: dict[str, list[int] | None] = {
    "before the batch is saved": [],
    "after the batch is saved": [],
    "between two steps": [],
    "in the middle of the log lines": [],
    "after the log lines": [],
    "before the policy is written": [],
    "before the policy is published": [],
    "published and not committed": [],
    "committed and not published": [],
    "after the commit": [],
    "before the checkpoint": [],
    "in the middle of the checkpoint": [],
    "before the checkpoint has its name": [],
    "after the checkpoint": [4],
    "batches after the checkpoint": None,
    "before the end of the run": [10],
    "after the end of the run": [10],
}
# The others are heavy tests.
OFTEN = (
    "between two steps",
    "published and not committed",
    "committed and not published",
    "in the middle of the checkpoint",
)


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """A function that trains the run in a folder in a separate process and returns its exit code."""
    command = [sys.executable, "-W", "error::RuntimeWarning", str(_SCRIPT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def run(folder: Path, moment: str) -> int:
            stdin.write(json.dumps([str(folder), moment]) + "\n")
            stdin.flush()
            return int(stdout.readline())

        yield run
        stdin.close()
        process.wait(60)


def history(root: Path) -> dict[str, Any]:
    """All results that must not depend on the point of the kill."""
    commits, policies, finished = pickle.loads((root / "broker.pickle").read_bytes())
    metrics, samples = (
        [json.loads(line) for line in (root / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    return {
        "steps": [(line["step"], line["batch_id"], line["loss"], line["gradient_norm"]) for line in metrics],
        "samples": [(line["step"], line["rollout_id"], line["program"]) for line in samples],
        "policies": [(manifest.policy_version, manifest.step, manifest.digest) for manifest in policies],
        "commits": commits,
        "finished": finished,
    }


@pytest.fixture(scope="module")
def undisturbed(train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The history of a run without a kill."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert train(root, "") == 0
    return history(root)


def test_an_undisturbed_run_has_each_step_batch_and_version_once(undisturbed: dict[str, Any]) -> None:
    assert [step[:2] for step in undisturbed["steps"]] == [(step, (step - 1) // 2) for step in range(1, 11)]
    assert undisturbed["commits"] == [(batch, 2 * batch + 2) for batch in range(5)]
    assert [policy[:2] for policy in undisturbed["policies"]] == [(version, 2 * version) for version in range(6)]
    assert len({digest for *_, digest in undisturbed["policies"]}) == 6
    assert undisturbed["finished"] is True


@pytest.mark.parametrize(
    "moment", [pytest.param(one, marks=() if one in OFTEN else pytest.mark.heavy) for one in MOMENTS]
)
def test_a_learner_killed_at_any_point_resumes_with_the_same_history(
    moment: str, train: Train, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    assert train(tmp_path, moment) == -signal.SIGKILL
    found, expected = [*numbered(tmp_path / "run" / "checkpoints")][-1:], MOMENTS[moment]
    assert expected is None or found == expected
    assert train(tmp_path, "") == 0
    assert history(tmp_path) == undisturbed
    assert max(numbered(tmp_path / "run" / "checkpoints")) == 10
    assert [*tmp_path.glob("run/*/*.part")] == []


@pytest.mark.heavy
def test_a_learner_killed_repeatedly_resumes_with_the_same_history(
    train: Train, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    for moment in ("before the policy is published", "between two steps", "after the commit", "after the checkpoint"):
        assert train(tmp_path, moment) == -signal.SIGKILL, moment
    assert train(tmp_path, "") == 0
    assert history(tmp_path) == undisturbed
