"""Trainers with the state of a run: at its beginning or at a checkpoint; and a saved batch that is trained on again."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

from nouscoder.config import Config
from nouscoder.errors import Unusable
from nouscoder.learner.batch_settings import BatchSettings
from nouscoder.learner.checkpoint import Checkpoint, CheckpointStore, restore
from nouscoder.learner.first_checkpoint import begin_with
from nouscoder.learner.objectives.base import Objective
from nouscoder.learner.ranks import Ranks
from nouscoder.learner.reference import reference_policy
from nouscoder.learner.run_files import RunFiles
from nouscoder.learner.saved_batches import SavedBatches
from nouscoder.learner.step_metrics import TrainedBatch
from nouscoder.learner.trainer import Trainer
from nouscoder.learner.weights import empty_model, load_model, stored_dtypes


def prepare_thread(num_threads: int) -> None:
    """Make this thread's arithmetic deterministic. Call it in the training thread before any other use of torch."""
    # cuBLAS is deterministic only with a fixed workspace. It reads this variable when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Rows differ in length: without it the memory of a GPU is cut into blocks of lengths that do not come again.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    # Else every tensor is filled before it is written. Nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def trainer_at(
    config: Config, checkpoint: Checkpoint | None, ranks: Ranks | None = None, objective: Objective | None = None
) -> Trainer:
    """A trainer with the state of a checkpoint, or with that at the beginning. All ranks must call it together.

    `objective` is that of the configuration unless it is given. Objectives that need a reference policy get the initial
    one, or their teacher. Raises Unusable, CheckpointError or WeightsError.
    """
    policy = RunFiles.of(config).policy
    # A checkpoint of adapters has no other weights: they are those of the initial policy.
    needs_weights = checkpoint is None or config.learner.lora.rank > 0
    model = load_model(policy) if needs_weights else empty_model(policy)
    try:
        trainer = Trainer(model, config, partial(reference_policy, policy), objective, ranks)
    except ValueError as error:
        raise Unusable(str(error)) from error
    if checkpoint is not None:
        restore(trainer, checkpoint)
    elif first := config.learner.first_checkpoint:
        begin_with(trainer, Path(first), stored_dtypes(policy))
    return trainer


def replay(config: Config, step: int, batch_id: int) -> TrainedBatch:
    """Train a saved batch in memory, starting from the checkpoint of `step`. The result equals the run's, bit for bit.

    Step 0 is the initial policy. Raises CheckpointError, SavedBatchError or WeightsError.
    """
    files = RunFiles.of(config)
    prepare_thread(config.learner.threads)
    store = CheckpointStore(files.checkpoints, config.learner.keep_checkpoints)
    trainer = trainer_at(config, store.at_step(step) if step else None)
    settings = BatchSettings(files.batches).kept(batch_id, config.learner) or config.learner
    trainer.use(settings)
    batches = SavedBatches(files.batches, settings.keep_batches)
    return trainer.train_batch(batches.load(batch_id), batches.before(batch_id, settings.replay_batches))
