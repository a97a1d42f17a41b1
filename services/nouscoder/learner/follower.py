"""What a rank other than 0 does.

A rank other than 0 does what rank 0 tells it, on its share of each batch. It reads batches, settings and checkpoints
from the run folder, which all ranks share. It writes only its part of a checkpoint, and of a policy with deltas.

INVARIANT: after each message of rank 0 the state of another rank is that of rank 0 after the same message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nouscoder.config import Config
from nouscoder.learner.loading import prepare_thread, trainer_at
from nouscoder.learner.model.weights import adapter_weights, stored_dtypes, weights_of
from nouscoder.learner.parallel.rank_messages import Listener, RankMessage, RankMessageKind
from nouscoder.learner.parallel.ranks import Ranks, naming_lost_ranks
from nouscoder.learner.publication.by_ranks import own_rows, write_own_rows
from nouscoder.learner.publication.publisher import version_folder
from nouscoder.learner.state.batch_settings import BatchSettings
from nouscoder.learner.state.checkpoint_store import CheckpointStore, PartOfCheckpoint, begin_part
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.learner.trainer import Trainer, TrainingInterrupted

log = logging.getLogger(__name__)


class RankFollower:
    """A rank other than 0, which runs the message loop in one thread."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self._files = RunFiles.of(config)
        self._batches = SavedBatches(self._files.batches, config.learner.keep_batches)
        self._settings = BatchSettings(self._files.batches)
        self._trainer: Trainer | None = None
        self._saving: PartOfCheckpoint | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="publication")
        self._works: dict[RankMessageKind, Callable[[RankMessage], None]] = {
            RankMessageKind.LOAD: self._load,
            RankMessageKind.TRAIN: self._train,
            RankMessageKind.GATHER: self._gather,
            RankMessageKind.PUBLISH: self._publish,
            RankMessageKind.SAVE: self._save,
        }

    def run(self) -> None:
        """Work until rank 0 says STOP or is interrupted. Raises NousCoderError, RankLost among others."""
        assert self._ranks.store is not None, "a learner of one rank has no followers"
        prepare_thread(self._config.learner.threads)
        listener = Listener(self._ranks, self._ranks.store)
        try:
            while (message := listener.next()).work is not RankMessageKind.STOP:
                log.info("message of rank 0", extra={"work": message.work.value, "number": message.number})
                with naming_lost_ranks(self._ranks.patience_s):
                    self._works[message.work](message)
            self._finish_saving()
            self._writing.shutdown()
        except TrainingInterrupted:
            log.info("rank 0 was interrupted inside a batch: a resume trains the batch again")
        finally:
            listener.leave()

    @property
    def _loaded(self) -> Trainer:
        assert self._trainer is not None, "rank 0 says LOAD first"
        return self._trainer

    def _load(self, message: RankMessage) -> None:
        store = CheckpointStore(self._files.checkpoints, self._config.learner.keep_checkpoints)
        checkpoint = store.at_step(message.number) if message.number else None
        self._trainer = trainer_at(self._config, checkpoint, self._ranks)
        self._dtypes = stored_dtypes(self._files.policy)

    def _train(self, message: RankMessage) -> None:
        settings = self._settings.kept(message.number, self._config.learner) or self._config.learner
        replayed = self._batches.before(message.number, settings.replay_batches)
        self._loaded.use(settings)
        self._loaded.train_batch(self._batches.load(message.number), replayed)

    def _gather(self, message: RankMessage) -> None:
        gather = adapter_weights if self._config.learner.lora.publishes_adapters else weights_of
        gather(self._loaded.model)

    def _publish(self, message: RankMessage) -> None:
        """Copy the own rows now, and write them while training goes on. Rank 0 waits for them before the next."""
        assert self._ranks.store is not None, "a learner of one rank has no followers"
        rows = own_rows(self._loaded.model, self._dtypes, self._ranks.rank)
        before, folder = version_folder(self._files.policies, message.number - 1), Path(message.folder)
        self._writing.submit(write_own_rows, rows, before, folder, self._ranks.rank, self._ranks.store)

    def _save(self, message: RankMessage) -> None:
        self._finish_saving()
        self._saving = begin_part(self._loaded, Path(message.folder))

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.wait()
        except OSError as error:
            log.warning("a checkpoint failed: rank 0 decides when to try again", extra={"fault": str(error)})
