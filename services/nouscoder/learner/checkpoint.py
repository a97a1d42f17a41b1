"""Durable checkpoints: weights, optimizer, random state, progress, and the log lines of the last batch.

INVARIANT: `newest` returns only a checkpoint whose every file has the checksum it was saved with; a torn one is
skipped with a log line, and the one before it is taken.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nouscoder.errors import NousCoderError
from nouscoder.learner.atomic_files import numbered, prune, sha256_of, whole_folder
from nouscoder.learner.run_log import LogTail
from nouscoder.learner.trainer import Trainer
from nouscoder.learner.weights import load_weights, weights_of

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_STATE = "state.json"
_RANDOM_STATE = "random_state"


class CheckpointError(NousCoderError):
    """A checkpoint cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: optimizer steps, the last batch trained on (-1: none), and the policy version it made."""

    step: int = 0
    batch_id: int = -1

    @property
    def policy_version(self) -> int:
        """The version of the weights: 0 is the initial policy, and each batch makes the next."""
        return self.batch_id + 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint on the disk."""

    path: Path
    progress: Progress
    log_tail: LogTail


class CheckpointStore:
    """The folder checkpoints/, one folder a checkpoint, named by its step."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, trainer: Trainer, progress: Progress, log_tail: LogTail) -> Path:
        """Write a checkpoint and remove the oldest. Raises StorageError; then no trace of it is left."""
        final = self._folder / f"{progress.step:08d}"
        with whole_folder(final) as part:
            save_file(weights_of(trainer.model), part / _WEIGHTS)
            save_file(_optimizer_tensors(trainer.optimizer), part / _OPTIMIZER)
            (part / _STATE).write_text(json.dumps({"progress": asdict(progress), "log_tail": asdict(log_tail)}))
            checksums = {name: sha256_of(part / name) for name in (_WEIGHTS, _OPTIMIZER, _STATE)}
            (part / _MANIFEST).write_text(json.dumps({"sha256": checksums}, indent=1))
        prune(self._folder, self._keep)
        return final

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None."""
        for path in reversed(numbered(self._folder).values()):
            try:
                return self._read(path)
            except CheckpointError as error:
                log.warning("skipping a torn checkpoint", extra={"checkpoint": str(path), "fault": str(error)})
        return None

    def at_step(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises CheckpointError when there is none or it is torn."""
        path = numbered(self._folder).get(step)
        if path is None:
            raise CheckpointError(f"there is no checkpoint of step {step} in {self._folder}")
        return self._read(path)

    def _read(self, path: Path) -> Checkpoint:
        manifest = _read_json(path / _MANIFEST)
        for name in (_WEIGHTS, _OPTIMIZER, _STATE):
            try:
                found = sha256_of(path / name)
            except OSError as error:
                raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
            if manifest.get("sha256", {}).get(name) != found:
                raise CheckpointError(f"{path / name} has not the checksum it was saved with")
        state = _read_json(path / _STATE)
        return Checkpoint(path, Progress(**state["progress"]), LogTail(**state["log_tail"]))


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's state into the trainer. Raises CheckpointError when it is of another model."""
    load_weights(trainer.model, checkpoint.path / _WEIGHTS)
    tensors = load_file(checkpoint.path / _OPTIMIZER)
    torch.set_rng_state(tensors.pop(_RANDOM_STATE))
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    # The settings (learning rate, decay, ...) are the configuration's, so they may change on resume.
    settings = trainer.optimizer.state_dict()["param_groups"]
    try:
        trainer.optimizer.load_state_dict({"state": state, "param_groups": settings})
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path} is of another model: {error}") from error
    trainer.step = checkpoint.progress.step


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `parameter index.name` -> tensor, and the random state of torch."""
    tensors = {
        f"{index}.{key}": tensor.detach().cpu().contiguous()
        for index, values in optimizer.state_dict()["state"].items()
        for key, tensor in values.items()
    }
    return {**tensors, _RANDOM_STATE: torch.get_rng_state()}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return value
