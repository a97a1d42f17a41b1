"""The checkpoint of the best evaluated policy stays, alone, wherever the run is killed.

best_checkpoint_process.py runs a learner that keeps only its newest checkpoint, and an evaluation after every batch.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from nouscoder.atomic_files import numbered
from nouscoder.learner.state.checkpoint_store import verified_checkpoint
from nouscoder.run.evaluation_files import recorded_evaluations

Train = Callable[[Path, str], int]
SCRIPT = Path(__file__).with_name("best_checkpoint_process.py")
MOMENTS = (
    "before the checkpoint is kept",
    "in the middle of the checkpoint that is kept",
    "after the checkpoint is kept",
    "before the weights are kept",
    "after the weights are kept",
    "after the policy is measured",
    "after the evaluation is recorded",
    "in the middle of removing the old best",
    "after the old best is removed",
)
OFTEN = ("after the weights are kept", "in the middle of removing the old best")  # the others are heavy tests


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """A function that trains the run in a folder in a separate process and returns its exit code."""
    with subprocess.Popen([sys.executable, str(SCRIPT)], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def run(folder: Path, moment: str) -> int:
            stdin.write(json.dumps([str(folder), moment]) + "\n")
            stdin.flush()
            while (line := stdout.readline()) and not line.strip().lstrip("-").isdigit():
                print(line)  # what the evaluations say
            return int(line)

        yield run
        stdin.close()
        process.wait(60)


def tensors_of(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """The tensors in a checkpoint, read by torch alone."""
    dcp_to_torch_save(checkpoint, scratch)
    tensors: dict[str, Any] = torch.load(scratch)
    return tensors


def assert_only_the_best_is_kept(root: Path) -> int:
    """Returns its version."""
    run = root / "run"
    best = max(recorded_evaluations(run), key=lambda evaluated: evaluated.pass_at_1).policy_version
    assert sorted(path.name for path in (run / "kept").iterdir()) == [f"{best:08d}", f"{best:08d}.checkpoint"]
    checkpoint = verified_checkpoint(run / "kept" / f"{best:08d}.checkpoint")
    assert (checkpoint.progress.policy_version, checkpoint.progress.step) == (best, 2 * best)
    weights = load_file(run / "kept" / f"{best:08d}" / "model.safetensors")
    stored = tensors_of(checkpoint.path, root / "stored.pt")
    for name, weight in weights.items():
        assert torch.equal(stored[f"model.{name}"], weight), name
    assert any(name.startswith("optimizer.") and stored[name].any() for name in stored), "no moments"
    return best


@pytest.mark.heavy
def test_the_best_checkpoint_stays_although_only_the_newest_is_kept(train: Train, tmp_path: Path) -> None:
    assert train(tmp_path, "") == 0
    assert [each.policy_version for each in recorded_evaluations(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]
    assert assert_only_the_best_is_kept(tmp_path) == 3
    assert [*numbered(tmp_path / "run" / "checkpoints")] == [12]


@pytest.mark.parametrize(
    "moment", [pytest.param(one, marks=() if one in OFTEN else pytest.mark.heavy) for one in MOMENTS]
)
def test_a_run_killed_at_any_point_keeps_the_best_checkpoint_and_no_other(
    moment: str, train: Train, tmp_path: Path
) -> None:
    assert train(tmp_path, moment) == -signal.SIGKILL
    evaluated = recorded_evaluations(tmp_path / "run")
    best = max(evaluated, key=lambda each: each.pass_at_1).policy_version
    # Version 2 is the best from the moment that its evaluation is recorded; until then version 1 is.
    assert best in (1, 2)
    verified_checkpoint(tmp_path / "run" / "kept" / f"{best:08d}.checkpoint")
    assert train(tmp_path, "") == 0
    assert_only_the_best_is_kept(tmp_path)
    assert [*numbered(tmp_path / "run" / "checkpoints")] == [12]
    assert [*tmp_path.glob("run/*/*.part")] == []
