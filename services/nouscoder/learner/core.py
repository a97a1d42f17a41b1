"""The learner without the network: the state of the run on disk and in memory, one batch at a time.

INVARIANT: the state after every batch that was trained can be reproduced from the disk, bit for bit, from the newest
undamaged checkpoint and the saved batches after it. Each batch is trained with the settings of its first training. A
batch counts as trained once its log lines are durable, and no group is in two batches. Only learner.replay_batches
has a group trained on again, beside a new batch.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from transformers import PreTrainedModel

from nouscoder.atomic_files import lock_file, naming_storage_faults
from nouscoder.config import Config
from nouscoder.domain.batch import Batch, RecordedBatch
from nouscoder.domain.learner_state import RunIdentity, TrainedState
from nouscoder.domain.policy import PolicyManifest, Transport, WeightTransfer
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.loading import prepare_thread, trainer_at
from nouscoder.learner.metrics.step import TrainedBatch
from nouscoder.learner.metrics.token_records import TokenRecords
from nouscoder.learner.model.weights import stored_dtypes
from nouscoder.learner.parallel.rank_messages import Leader, RankMessage, RankMessageKind
from nouscoder.learner.parallel.ranks import Ranks
from nouscoder.learner.publication.by_ranks import fits
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.state.batch_settings import BatchSettings
from nouscoder.learner.state.checkpoint_store import Checkpoint, CheckpointStore, PendingCheckpoint, Progress
from nouscoder.learner.state.first_policy import require_first_policy
from nouscoder.learner.state.run_files import RunFiles, open_identity
from nouscoder.learner.state.run_log import BatchLines, BatchSeconds, RunLog, metrics_lines, reward_line, sample_lines
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.learner.trainer import Trainer
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError, load_tokenizer

log = logging.getLogger(__name__)


class LearnerError(NousCoderError):
    """The learner cannot continue. The message says why."""


class HalfTrained(LearnerError):
    """The batch in training is incomplete, so the state in memory is not that after a whole number of batches."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What `start` has loaded. `dtypes` are the types of the policy folder, by name of the tensor."""

    identity: RunIdentity
    tokenizer: PolicyTokenizer
    dtypes: dict[str, torch.dtype]
    trainer: Trainer


class LearnerCore:
    """Trains and stores batches. After each call, `start` can resume from the disk.

    All methods must be called from one thread, unless their docstring allows others.
    """

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        settings = config.learner
        self.ranks = ranks or Ranks()
        self._leader = Leader(self.ranks)
        if config.step_fault:
            raise Unusable(config.step_fault)
        self._config = config
        self._files = RunFiles.of(config)
        self._store = CheckpointStore(self._files.checkpoints, settings.keep_checkpoints)
        transfer = config.generation.vllm.weight_transfer
        self._publisher = PolicyPublisher(
            self._files.policies,
            settings.keep_policies,
            config.generation.policy_from,
            settings.policy_shard_bytes,
            deltas=settings.policy_deltas
            and (config.generation.policy_from is Transport.LEARNER or transfer is not WeightTransfer.FILES),
            first=self._files.policy,
        )
        # What is sent from memory must be whole in the memory of rank 0.
        self._writes_by_ranks = self.ranks.size > 1 and transfer is WeightTransfer.FILES
        self._batches = SavedBatches(self._files.batches, settings.keep_batches)
        self._settings = BatchSettings(self._files.batches)
        self._run_log = RunLog(self._files.run)
        self._token_records = TokenRecords(self._files.run)
        self._lock: TextIO | None = None
        self._loaded: _Loaded | None = None
        self.progress = Progress()  # of the state in memory
        self.newest_checkpoint: Checkpoint | None = None  # that is durable
        self._in_batch = False

    @property
    def model(self) -> PreTrainedModel:
        """The policy being trained."""
        return self._started.trainer.model

    def start(self) -> None:
        """Lock the run folder, load the newest undamaged checkpoint or the initial policy, and read the logs."""
        prepare_thread(self._config.learner.threads)
        # One learner a run. The operating system frees the lock when the process exits for any reason.
        path = self._files.checkpoints / ".lock"
        with naming_storage_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(path, f"another learner is working in {self._files.run}")
        identity = open_identity(self._config)
        torch.manual_seed(self._config.run.seed)
        try:
            tokenizer = load_tokenizer(self._files.policy)
        except TokenizerError as error:
            raise Unusable(str(error)) from error
        dtypes = stored_dtypes(self._files.policy)
        checkpoint = self._store.newest()
        if checkpoint is not None:
            self.progress, self.newest_checkpoint = checkpoint.progress, checkpoint
        with self._leader.together(RankMessage(RankMessageKind.LOAD, self.progress.step)):
            trainer = trainer_at(self._config, checkpoint, self.ranks)
        has_adapter = self._config.learner.lora.rank > 0
        require_first_policy(self._config, reads_weights_again=has_adapter or trainer.has_reference)
        self._loaded = _Loaded(identity, tokenizer, dtypes, trainer)
        last_batch = max([self.progress.batch_id, *self._batches.numbers()])
        self._run_log.open((last_batch + 1) * self._config.learner.steps_per_batch)
        log.info("state loaded", extra={"step": self.progress.step, "batch_id": self.progress.batch_id})

    @property
    def identity(self) -> RunIdentity:
        """Which run this is."""
        return self._started.identity

    def trained_state(self, policy: PolicyManifest | None) -> TrainedState:
        """What was trained on up to now; `policy` is the newest that was published. From any thread."""
        done = self.progress
        return TrainedState(self.identity, done.batch_id + 1, done.step, done.rollouts, done.groups, policy)

    def next_was_trained(self) -> bool:
        """Whether an earlier process saved and completely trained the next batch, so that its last log line exists."""
        next_batch = self.progress.batch_id + 1
        is_logged = self._run_log.has_step((next_batch + 1) * self._config.learner.steps_per_batch)
        return is_logged and next_batch in self._batches.numbers()

    async def save_batch(self, batch: RecordedBatch, records: AsyncIterable[bytes]) -> None:
        """Save the batch for a replay, as SavedBatches.save does. Call it in the event loop."""
        await self._batches.save(batch, records)

    def load_batch(self, batch_id: int) -> Batch:
        """Load a saved batch. Its records stay in the memory-mapped file. Raises SavedBatchError."""
        return self._batches.load(batch_id)

    def train(self, batch: Batch, seconds: BatchSeconds | None = None) -> TrainedBatch:
        """Take the k steps in memory and write the batch's log lines. `seconds` are only logged.

        Raises LearnerError for a batch that is not the next one, StorageError, SavedBatchError or TrainingError.
        """
        if batch.batch_id != self.progress.batch_id + 1:
            raise LearnerError(
                f"batch {batch.batch_id} was leased, but batch {self.progress.batch_id + 1} is next:"
                " the broker's state and this run folder belong to different runs"
            )
        self._in_batch = True
        try:
            self.progress.after(batch, self._started.trainer.step)  # refuses a group that was trained on before
            settings = self._settings.fix(batch.batch_id, self._config.learner)
            replayed = self._batches.before(batch.batch_id, settings.replay_batches)
            with self._leader.together(RankMessage(RankMessageKind.TRAIN, batch.batch_id)):
                self._started.trainer.use(settings)
                trained = self._started.trainer.train_batch(batch, replayed)
        except ValueError as error:
            raise LearnerError(f"batch {batch.batch_id} cannot be trained on: {error}") from error
        self._run_log.append(self._lines(trained, seconds or BatchSeconds()))
        self._token_records.write(trained, trained.batch_id + 1, self._started.tokenizer)
        self.progress = self.progress.after(batch, self._started.trainer.step)
        self._in_batch = False
        return trained

    def stage_policy(self) -> StagedPolicy:
        """Copy what is published, so that it can be written while training continues: the adapter, or whole weights.

        Whole weights have the types of the policy folder.
        """
        version, step = self.progress.policy_version, self.progress.step
        dtypes = self._started.dtypes
        fits_files = partial(fits, self.model, dtypes)
        if self._writes_by_ranks and (by_ranks := self._publisher.begin_by_ranks(version, self.ranks, fits_files)):
            self._leader.tell(RankMessage(RankMessageKind.PUBLISH, version, str(by_ranks.folder)))
            by_ranks.copy_rows(self.model, dtypes)
            return StagedPolicy(version, step, {}, by_ranks=by_ranks)
        with self._leader.together(RankMessage(RankMessageKind.GATHER)):
            if self._config.learner.lora.publishes_adapters:
                return StagedPolicy.of_adapter(self.model, version, step)
            return StagedPolicy.of(self.model, version, step, dtypes, self._files.policy)

    def write_policy(self, policy: StagedPolicy) -> PolicyManifest:
        """Write a policy as files that generation can load. Any thread, one at a time. Raises StorageError."""
        return self._publisher.write(policy)

    def begin_checkpoint(self) -> PendingCheckpoint:
        """Copy the state and start to write it. Raises StorageError, and HalfTrained inside a batch."""
        if self._in_batch:
            raise HalfTrained("a checkpoint holds only whole batches, and the batch in training is incomplete")

        def tell(part: Path) -> None:
            self._leader.tell(RankMessage(RankMessageKind.SAVE, folder=str(part)))

        return self._store.begin(self._started.trainer, self.progress, tell)

    def finish_checkpoint(self, pending: PendingCheckpoint) -> Checkpoint:
        """Wait until it is durable, then remove files that are no longer needed. Any thread. Raises StorageError."""
        checkpoint = pending.finish()
        self._store.prune()
        self._batches.prune(self._last_unneeded_batch())
        self._settings.prune(min(self._batches.numbers(), default=0))
        self.newest_checkpoint = checkpoint
        return checkpoint

    def _last_unneeded_batch(self) -> int:
        """No batch after the fallback checkpoint can be trained again without those after this one."""
        fallback, current = self._store.fallback_batch(), self._config.learner
        later = [number for number in self._batches.numbers() if number > fallback]
        settings = [self._settings.kept(number, current) or current for number in later]
        return fallback - max(one.replay_batches for one in [current, *settings])

    def check_ranks(self) -> None:
        """Raises RankLost when another rank has not answered for learner.rank_patience_s. Any thread."""
        self._leader.check()

    def interrupt(self) -> None:
        """Stop before the next step. Any thread."""
        if self._loaded is not None:
            self._loaded.trainer.interrupt()

    def close(self) -> None:
        """Stop the other ranks and unlock the run folder."""
        self._leader.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _started(self) -> _Loaded:
        if self._loaded is None:
            raise LearnerError("the learner has not started")
        return self._loaded

    def _lines(self, trained: TrainedBatch, seconds: BatchSeconds) -> BatchLines:
        count, seed = self._config.learner.samples_per_batch, self._config.run.seed
        return BatchLines(
            metrics_lines(trained, trained.batch_id + 1, seconds),
            sample_lines(trained, self._started.tokenizer.decode, count, seed),
            [reward_line(trained)],
        )
