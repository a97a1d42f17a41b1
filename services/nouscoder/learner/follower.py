"""A rank other than 0: it does what rank 0 tells it, on its share of each batch.

It reads batches, settings and checkpoints from the run folder, which all ranks share. It writes only its part of a
checkpoint.

INVARIANT: after each command its state is that of rank 0 after the same command.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from nouscoder.config import Config
from nouscoder.learner.batch_settings import BatchSettings
from nouscoder.learner.checkpoint import CheckpointStore, PartOfCheckpoint, begin_part
from nouscoder.learner.commands import Command, Listener, Work
from nouscoder.learner.loading import prepare_thread, trainer_at
from nouscoder.learner.ranks import Ranks, naming_lost_ranks
from nouscoder.learner.run_files import RunFiles
from nouscoder.learner.saved_batches import SavedBatches
from nouscoder.learner.trainer import Trainer, TrainingInterrupted
from nouscoder.learner.weights import adapter_weights, weights_of

log = logging.getLogger(__name__)


class Follower:
    """Runs the command loop in one thread."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self._files = RunFiles.of(config)
        self._batches = SavedBatches(self._files.batches, config.learner.keep_batches)
        self._settings = BatchSettings(self._files.batches)
        self._trainer: Trainer | None = None
        self._saving: PartOfCheckpoint | None = None
        self._works: dict[Work, Callable[[Command], None]] = {
            Work.LOAD: self._load,
            Work.TRAIN: self._train,
            Work.GATHER: self._gather,
            Work.SAVE: self._save,
        }

    def run(self) -> None:
        """Work until rank 0 says STOP or is interrupted. Raises NousCoderError, RankLost among others."""
        assert self._ranks.store is not None, "a learner of one rank has no followers"
        prepare_thread(self._config.learner.threads)
        listener = Listener(self._ranks, self._ranks.store)
        try:
            while (command := listener.next()).work is not Work.STOP:
                log.info("command", extra={"work": command.work.value, "number": command.number})
                with naming_lost_ranks(self._ranks.patience_s):
                    self._works[command.work](command)
            self._finish_saving()
        except TrainingInterrupted:
            log.info("rank 0 was interrupted inside a batch: a resume trains the batch again")
        finally:
            listener.leave()

    @property
    def _loaded(self) -> Trainer:
        assert self._trainer is not None, "rank 0 says LOAD first"
        return self._trainer

    def _load(self, command: Command) -> None:
        store = CheckpointStore(self._files.checkpoints, self._config.learner.keep_checkpoints)
        checkpoint = store.at_step(command.number) if command.number else None
        self._trainer = trainer_at(self._config, checkpoint, self._ranks)

    def _train(self, command: Command) -> None:
        settings = self._settings.kept(command.number, self._config.learner) or self._config.learner
        replayed = self._batches.before(command.number, settings.replay_batches)
        self._loaded.use(settings)
        self._loaded.train_batch(self._batches.load(command.number), replayed)

    def _gather(self, command: Command) -> None:
        gather = adapter_weights if self._config.learner.lora.publishes_adapters else weights_of
        gather(self._loaded.model)

    def _save(self, command: Command) -> None:
        self._finish_saving()
        self._saving = begin_part(self._loaded, Path(command.folder))

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.wait()
        except OSError as error:
            log.warning("a checkpoint failed: rank 0 decides when to try again", extra={"fault": str(error)})
