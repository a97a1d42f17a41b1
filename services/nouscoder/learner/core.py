"""The learner without the network: state of the run on disk and in memory, one batch at a time.

INVARIANT: the state on disk is always that after a whole number of batches. What `start` finds there is the newest
good checkpoint; everything else on disk (log lines, a batch saved early, a policy written early) is brought into line
with it or made again bit for bit.
"""

from __future__ import annotations

import fcntl
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from transformers import PreTrainedModel

from nouscoder.config import Config
from nouscoder.domain.batch import Batch
from nouscoder.domain.policy import PolicyManifest
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.atomic_files import naming_storage_faults
from nouscoder.learner.checkpoint import CheckpointStore, Progress, restore
from nouscoder.learner.objectives.registry import objective_of
from nouscoder.learner.publish import PolicyPublisher
from nouscoder.learner.run_log import BatchSeconds, LogTail, RunLog, metrics_lines, sample_lines, with_seconds
from nouscoder.learner.saved_batches import SavedBatches
from nouscoder.learner.trainer import TrainedBatch, Trainer
from nouscoder.learner.weights import empty_model, load_model
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError, load_tokenizer

log = logging.getLogger(__name__)


class LearnerError(NousCoderError):
    """The learner cannot go on; the message says why."""


class FolderInUse(LearnerError):
    """Another learner works in the run folder just now."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Where a run's files are. `policy` holds the initial policy; the rest is written by the learner."""

    run: Path
    policy: Path

    @classmethod
    def of(cls, config: Config) -> RunFiles:
        """Those of a configuration."""
        return cls(config.run.folder, config.in_run_folder(config.policy.path))

    @property
    def checkpoints(self) -> Path:
        """A folder a checkpoint."""
        return self.run / "checkpoints"

    @property
    def policies(self) -> Path:
        """A folder a published version."""
        return self.run / "policies"

    @property
    def batches(self) -> Path:
        """A file a batch."""
        return self.run / "batches"


def prepare_thread(num_threads: int) -> None:
    """Make this thread's arithmetic repeatable. Call it in the thread that trains, before anything else of torch."""
    # cuBLAS is repeatable only with a fixed workspace; it reads this when it first starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)


class LearnerCore:
    """Call all but `interrupt` and `close` from one thread. After each stage `start` can resume from the disk."""

    def __init__(self, config: Config) -> None:
        settings = config.learner
        num_groups = config.broker.batch_size // config.broker.group_size
        if settings.steps_per_batch > num_groups:
            raise Unusable(
                f"learner.steps_per_batch is {settings.steps_per_batch}, but a batch has {num_groups} groups:"
                " each step needs a whole group"
            )
        self._config = config
        self._files = RunFiles.of(config)
        self._store = CheckpointStore(self._files.checkpoints, settings.keep_checkpoints)
        self._publisher = PolicyPublisher(
            self._files.policies,
            settings.keep_policies,
            config.generation.policy_from,
            settings.policy_shard_bytes,
        )
        self._batches = SavedBatches(self._files.batches, settings.keep_batches)
        self._run_log = RunLog(self._files.run)
        self._lock: TextIO | None = None
        self._trainer: Trainer | None = None
        self._tokenizer: PolicyTokenizer | None = None
        self._tail = LogTail()
        self._progress = Progress()
        self._in_batch = False
        self._saved: Path | None = None

    @property
    def progress(self) -> Progress:
        """Of the state in memory."""
        return self._progress

    @property
    def model(self) -> PreTrainedModel:
        """The policy being trained."""
        model: PreTrainedModel = self._started.model
        return model

    def start(self) -> None:
        """Take the run folder, load the newest good checkpoint or the initial policy, bring the logs into line."""
        prepare_thread(self._config.learner.threads)
        self._lock_folder()
        torch.manual_seed(self._config.run.seed)
        try:
            self._tokenizer = load_tokenizer(self._files.policy)
        except TokenizerError as error:
            raise Unusable(str(error)) from error
        checkpoint = self._store.newest()
        if checkpoint is None:
            self._trainer = _trainer(load_model(self._files.policy), self._config)
        else:
            self._trainer = _trainer(empty_model(self._files.policy), self._config)
            restore(self._trainer, checkpoint)
            self._progress, self._tail, self._saved = checkpoint.progress, checkpoint.log_tail, checkpoint.path
        self._run_log.resume(self._progress.step, self._tail)
        log.info("state loaded", extra={"step": self._progress.step, "batch_id": self._progress.batch_id})

    def save_batch(self, batch: Batch) -> None:
        """Stage 1: keep the batch for a replay."""
        self._batches.save(batch)

    def train(self, batch: Batch, wait_s: float = 0.0) -> TrainedBatch:
        """Stage 2: the k steps, in memory; `wait_s` is only logged. Raises LearnerError for a batch out of turn."""
        if batch.batch_id != self._progress.batch_id + 1:
            raise LearnerError(
                f"batch {batch.batch_id} was given where batch {self._progress.batch_id + 1} is next:"
                " the broker's run and this run folder do not belong together"
            )
        self._in_batch = True
        try:
            trained = self._started.train_batch(batch)
        except ValueError as error:
            raise LearnerError(f"batch {batch.batch_id} cannot be trained on: {error}") from error
        self._progress = Progress(self._started.step, batch.batch_id)
        self._in_batch = False
        self._tail = self._lines(trained, wait_s)
        return trained

    def checkpoint(self) -> Path:
        """Stage 3: make the state durable, unless it is. Raises StorageError, and LearnerError inside a batch."""
        if self._in_batch:
            raise LearnerError("a checkpoint holds whole batches only, and the batch in training failed half way")
        if self._saved is None or int(self._saved.name) != self._progress.step:
            self._saved = self._store.save(self._started, self._progress, self._tail)
        return self._saved

    def write_policy(self) -> PolicyManifest:
        """Stage 4: the weights as a file that generation can load."""
        return self._publisher.write(self.model, self._progress.policy_version, self._progress.step)

    def write_log(self, checkpoint_s: float, publish_s: float) -> None:
        """Stage 5, after the commit: the batch's lines."""
        self._run_log.append(with_seconds(self._tail, BatchSeconds(checkpoint=checkpoint_s, publish=publish_s)))

    def replay_saved(self, batch_id: int) -> TrainedBatch:
        """All stages but publication, for a batch that was committed and whose checkpoint was lost later."""
        trained = self.train(self._batches.load(batch_id))
        self.checkpoint()
        self.write_log(0.0, 0.0)
        return trained

    def interrupt(self) -> None:
        """From any thread: stop before the next step."""
        if self._trainer is not None:
            self._trainer.interrupt()

    def close(self) -> None:
        """Let the run folder go."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _started(self) -> Trainer:
        if self._trainer is None:
            raise LearnerError("the learner has not started")
        return self._trainer

    def _lines(self, trained: TrainedBatch, wait_s: float) -> LogTail:
        if self._tokenizer is None:
            raise LearnerError("the learner has not started")
        metrics = metrics_lines(trained, self._progress.policy_version, BatchSeconds(wait_for_batch=wait_s))
        count, seed = self._config.learner.samples_per_batch, self._config.run.seed
        return LogTail(metrics, sample_lines(trained, self._tokenizer, count, seed))

    def _lock_folder(self) -> None:
        """One learner a run: the lock goes with the process, however it ends."""
        path = self._files.checkpoints / ".lock"
        with naming_storage_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise FolderInUse(f"another learner is working in {self._files.run}") from None


def _trainer(model: PreTrainedModel, config: Config) -> Trainer:
    """A trainer of `model`, with the initial policy as the reference when the objective needs one."""
    needs = objective_of(config.learner.objective).needs
    reference = load_model(RunFiles.of(config).policy) if needs.reference_logprobs else None
    try:
        return Trainer(model, config, reference)
    except ValueError as error:
        raise Unusable(str(error)) from error


def replay(config: Config, step: int, batch_id: int) -> TrainedBatch:
    """Train a saved batch from the checkpoint of `step` in memory, writing nothing: what a run did, bit for bit.

    Step 0 is the initial policy. Raises CheckpointError, SavedBatchError or WeightsError.
    """
    files = RunFiles.of(config)
    prepare_thread(config.learner.threads)
    if step == 0:
        trainer = _trainer(load_model(files.policy), config)
    else:
        trainer = _trainer(empty_model(files.policy), config)
        restore(trainer, CheckpointStore(files.checkpoints, config.learner.keep_checkpoints).at_step(step))
    return trainer.train_batch(SavedBatches(files.batches, config.learner.keep_batches).load(batch_id))
