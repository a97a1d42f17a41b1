"""Checkpoints: weights, optimizer, entropy coefficient, random state, progress. DCP (torch.distributed) writes them.

`begin` copies the state; the copy is written while training continues. `finish` waits for the writing and gives the
checkpoint its name.

INVARIANT: `newest` returns only a checkpoint in which every file has its recorded checksum. A damaged one is skipped
with a log line, and the previous one is used.

Some checkpoints are kept apart from the newest ones: of the best evaluated policy, and of the one being measured. They
are made of hard links to the files of an ordinary one, so they cost no writing, and no pruning of the ordinary ones
removes them. The learner makes them; the run's evaluations remove those that are not the best.

INVARIANT: kept/VERSION.checkpoint has every file of the checkpoint after that version, or does not exist.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from nouscoder.atomic_files import link_or_copy, numbered, prune, sha256_of, whole_folder
from nouscoder.domain.batch import Batch
from nouscoder.domain.learner_state import TrainedGroups, group_number
from nouscoder.errors import ExitCode, NousCoderError
from nouscoder.input_file import read_json_object
from nouscoder.learner.model.weights import put_weights, trained_weights
from nouscoder.learner.optimizer import put_states
from nouscoder.learner.parallel.ranks import naming_lost_ranks, zeros_by_rows
from nouscoder.learner.trainer import Trainer

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"

_STATE = "state.json"

_DCP_METADATA = ".metadata"

_RANDOM_STATE, _ENTROPY_COEFFICIENT = "random_state", "entropy_coefficient"

_SUFFIX = ".checkpoint"  # of a kept one
_MODEL, _OPTIMIZER = "model.", "optimizer."

# DCP warns at each save and load that only one process trains.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(NousCoderError):
    """A checkpoint cannot be used. The message names it."""

    exit_code = ExitCode.DAMAGED


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: optimizer steps, the last batch trained on (-1: none), and what was trained on in all.

    `rollouts` (how many) and `groups` belong to the learner's state (domain/learner_state.py).
    """

    step: int = 0
    batch_id: int = -1
    rollouts: int = 0
    groups: TrainedGroups = TrainedGroups()

    @property
    def policy_version(self) -> int:
        """The version of the weights: 0 is the initial policy, and each batch makes the next."""
        return self.batch_id + 1

    def after(self, batch: Batch, step: int) -> Progress:
        """The progress after this batch too. Raises ValueError when a group of it was trained on before."""
        groups = self.groups.plus(map(group_number, batch.groups()))
        return Progress(step, batch.batch_id, self.rollouts + len(batch.rollouts), groups)

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {**asdict(self), "groups": self.groups.bits.hex()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        """Raises KeyError, TypeError or ValueError."""
        groups = TrainedGroups(bytes.fromhex(value["groups"]))
        return cls(int(value["step"]), int(value["batch_id"]), int(value["rollouts"]), groups)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    progress: Progress


@dataclass(frozen=True, slots=True)
class PartOfCheckpoint:
    """What this rank writes of a checkpoint, from a copy of its state."""

    written: Future[Metadata]
    patience_s: float

    def wait(self) -> None:
        """Wait until all ranks have written their parts. Raises RankLost, or the OSError of one that could not."""
        try:
            with naming_lost_ranks(self.patience_s):
                self.written.result()
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


def begin_part(trainer: Trainer, folder: Path) -> PartOfCheckpoint:
    """Copy the state of this rank and start to write it into `folder`. All ranks must call it."""
    writer = FileSystemWriter(folder, sync_files=False)  # whole_folder flushes every file
    ranks = trainer.ranks
    alone = not ranks.is_group
    written = async_save(_state_of(trainer), storage_writer=writer, process_group=ranks.files, no_dist=alone)
    assert isinstance(written, Future)
    return PartOfCheckpoint(written, ranks.patience_s)


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint that is being written from a copy of the state into `folder`, which gets its name at the end."""

    path: Path
    progress: Progress
    folder: Path
    own_part: PartOfCheckpoint
    undo: ExitStack

    def finish(self) -> Checkpoint:
        """Wait until it is written and durable. Call it once. Raises StorageError, and then leaves no files."""
        with self.undo:
            self.own_part.wait()
            (self.folder / _STATE).write_text(json.dumps({"progress": self.progress.to_json()}))
            checksums = {file.name: sha256_of(file) for file in sorted(self.folder.iterdir())}
            (self.folder / _MANIFEST).write_text(json.dumps({"sha256": checksums}, indent=1))
        return Checkpoint(self.path, self.progress)


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """The folder checkpoints/, with one folder per checkpoint, named by its step. The newest `keep` are kept."""

    folder: Path
    keep: int

    def begin(
        self, trainer: Trainer, progress: Progress, tell: Callable[[Path], None] = lambda _folder: None
    ) -> PendingCheckpoint:
        """Copy the state and start to write it. `tell` gives other ranks the folder. Raises StorageError."""
        final = self.folder / f"{progress.step:08d}"
        with ExitStack() as undo:
            folder = undo.enter_context(whole_folder(final))
            tell(folder)
            return PendingCheckpoint(final, progress, folder, begin_part(trainer, folder), undo.pop_all())

    def prune(self) -> None:
        """Remove all but the newest `keep`, and incomplete ones of a crash. No checkpoint may be pending."""
        prune(self.folder, self.keep)

    def fallback_batch(self) -> int:
        """The last batch in the oldest checkpoint that may be needed; -1 when the initial policy may be needed.

        The oldest kept checkpoint may be needed, because the newer ones may be damaged. While fewer than `keep` exist,
        the initial policy may be needed.
        """
        kept = [*numbered(self.folder).values()]
        if len(kept) < self.keep:
            return -1
        try:
            return _progress_of(kept[0]).batch_id
        except CheckpointError:
            return -1

    def newest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint, or None."""
        for path in reversed(numbered(self.folder).values()):
            try:
                return verified_checkpoint(path)
            except CheckpointError as error:
                log.warning("skipping a damaged checkpoint", extra={"checkpoint": str(path), "fault": str(error)})
        return None

    def at_step(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises CheckpointError when it is missing or damaged."""
        path = numbered(self.folder).get(step)
        if path is None:
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.folder}")
        return verified_checkpoint(path)


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into the trainer. Raises CheckpointError or Unusable when it belongs to another model."""
    tensors = _load(checkpoint.path, trainer)
    torch.set_rng_state(tensors.pop(_RANDOM_STATE))
    trainer.entropy_coefficient = float(tensors.pop(_ENTROPY_COEFFICIENT))
    weights = {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items() if name.startswith(_MODEL)}
    put_weights(trainer.model, weights, checkpoint.path)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(_OPTIMIZER):
            index, _, key = name.removeprefix(_OPTIMIZER).partition(".")
            state.setdefault(int(index), {})[key] = tensor
    # Settings such as the learning rate come from the configuration, so they may change on resume.
    try:
        put_states(trainer.optimizer, state)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path} cannot be used: {error}") from error
    trainer.step = checkpoint.progress.step


def _state_of(trainer: Trainer) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name. They are the trainer's own tensors, which `async_save` copies."""
    weights = {f"{_MODEL}{name}": tensor for name, tensor in trained_weights(trainer.model).items()}
    optimizer = {
        f"{_OPTIMIZER}{index}.{key}": tensor.detach()
        for index, values in trainer.optimizer.state_dict()["state"].items()
        for key, tensor in values.items()
    }
    coefficient = torch.tensor([trainer.entropy_coefficient], dtype=torch.float64)
    return {**weights, **optimizer, _ENTROPY_COEFFICIENT: coefficient, _RANDOM_STATE: torch.get_rng_state()}


def _load(path: Path, trainer: Trainer) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name; of those with the rows of a sharded weight, this rank's part."""
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    weights = {f"{_MODEL}{name}": tensor for name, tensor in trained_weights(trainer.model).items()}
    for index, weight in enumerate(weight for group in trainer.optimizer.param_groups for weight in group["params"]):
        weights[f"{_OPTIMIZER}{index}"] = weight.detach()
    tensors: dict[str, Any] = {
        name: _empty(item, weights.get(name if name.startswith(_MODEL) else name.rpartition(".")[0]))
        for name, item in stored.items()
        if isinstance(item, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _empty(item: TensorStorageMetadata, weight: Tensor | None) -> Tensor:
    """A tensor for what is stored, divided among ranks as the weight that it belongs to."""
    if isinstance(weight, DTensor) and item.size[:1] == weight.shape[:1]:
        return zeros_by_rows(weight, item.size, item.properties.dtype)
    return torch.empty(item.size, dtype=item.properties.dtype)


def verified_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises CheckpointError when a file of it is missing or damaged."""
    checksums = read_json_object(path / _MANIFEST, CheckpointError).get("sha256", {})
    progress = _progress_of(path)
    for name in sorted({*checksums, _STATE, _DCP_METADATA}):
        try:
            found = sha256_of(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if checksums.get(name) != found:
            raise CheckpointError(f"{path / name} does not have its recorded checksum")
    return Checkpoint(path, progress)


def _progress_of(path: Path) -> Progress:
    try:
        return Progress.from_json(read_json_object(path / _STATE, CheckpointError)["progress"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / _STATE} does not hold the progress of a run") from error


def keep_checkpoint(kept: Path, checkpoint: Checkpoint) -> Path:
    """Keep a checkpoint in the folder `kept`. Returns its folder there. Raises StorageError."""
    to = kept / f"{checkpoint.progress.policy_version:08d}{_SUFFIX}"
    with whole_folder(to) as part:
        for file in sorted(checkpoint.path.iterdir()):
            link_or_copy(file, part / file.name)
    return to
