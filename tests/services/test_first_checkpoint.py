"""A new run that begins with the checkpoint of another run: its steps are those that the other run would have taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nouscoder.config import Config, ConfigError, LearnerSection, PolicySection, RunSection, load_config
from nouscoder.errors import Unusable
from nouscoder.learner.loading import trainer_at
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.state.checkpoint_store import CheckpointStore, Progress
from nouscoder.learner.trainer import Trainer

LEARNER = {"steps_per_batch": 2, "learning_rate": 1e-2}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Earlier:
    """A run of two batches, with the checkpoint and the exported policy after the first."""

    def __init__(self, root: Path, stored: torch.dtype) -> None:
        trainer = Trainer(random_policy(0), Config(learner=LearnerSection.model_validate(LEARNER)))
        trainer.train_batch(random_batch(0, seed=1))
        self.policy = root / "exported"
        exported = random_policy(0)
        exported.load_state_dict(trainer.model.state_dict())
        write_policy_folder(self.policy, exported.type(stored))
        self.checkpoint = CheckpointStore(root / "kept", 1).begin(trainer, Progress(2, 0)).finish().path
        trainer.train_batch(random_batch(1, seed=1))
        self.after = trainer.model.state_dict()


def begun(root: Path, policy: Path, checkpoint: Path | str) -> Trainer:
    """The trainer of a new run."""
    learner = LearnerSection.model_validate({**LEARNER, "first_checkpoint": str(checkpoint)})
    return trainer_at(Config(run=RunSection(root=root), policy=PolicySection(path=policy), learner=learner), None)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_first_steps_continue_with_the_moments_of_the_checkpoint(tmp_path: Path, stored: torch.dtype) -> None:
    earlier = Earlier(tmp_path, stored)
    trainer = begun(tmp_path / "new", earlier.policy, earlier.checkpoint)
    assert trainer.step == 0
    trainer.train_batch(random_batch(1, seed=1))
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, earlier.after[name]), name
    # Without it the moments begin anew, and the steps are others.
    anew = begun(tmp_path / "new", earlier.policy, "")
    anew.train_batch(random_batch(1, seed=1))
    assert any(not torch.equal(weight, earlier.after[name]) for name, weight in anew.model.state_dict().items())


def test_the_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path, torch.bfloat16)
    write_policy_folder(tmp_path / "first", random_policy(0).type(torch.bfloat16))
    with pytest.raises(
        Unusable, match=r"learner.first_checkpoint: .* is not the checkpoint of the policy in policy.pa"
    ):
        begun(tmp_path / "new", tmp_path / "first", earlier.checkpoint)


def test_a_damaged_or_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path, torch.float32)
    file = earlier.checkpoint / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(Unusable, match=r"learner.first_checkpoint: .*__0_0.distcp does not have its recorded checksum"):
        begun(tmp_path / "new", earlier.policy, earlier.checkpoint)
    with pytest.raises(Unusable, match=r"learner.first_checkpoint: .*manifest.json cannot be read"):
        begun(tmp_path / "new", earlier.policy, tmp_path)


def test_a_run_with_adapters_begins_anew() -> None:
    with pytest.raises(ConfigError, match="first_checkpoint is for runs that train whole weights"):
        load_config(None, ['learner.first_checkpoint="kept/00000012.checkpoint"', "learner.lora.rank=4"])
