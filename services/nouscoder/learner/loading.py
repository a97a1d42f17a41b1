"""Trainers with the state of a run: at its beginning or at a checkpoint.

A new run may begin with the checkpoint of another run: its weights, its optimizer's moments, its entropy control. The
first policy of the new run must be that of the checkpoint's version, as `nouscoder export` writes it. It is what is
sampled from first, and the reference policy. The steps of the new run, and so its learning rate's schedule, begin at 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nouscoder.config import Config
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.model.reference import reference_policy
from nouscoder.learner.model.weights import empty_model, load_model, stored_dtypes, trained_weights
from nouscoder.learner.parallel.ranks import Ranks, own_part
from nouscoder.learner.state.checkpoint_store import Checkpoint, restore, verified_checkpoint
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.base import Objective

_KEY = "learner.first_checkpoint"


def begin_with(trainer: Trainer, path: Path, stored: Mapping[str, torch.dtype]) -> None:
    """Load the checkpoint in the folder `path` into the trainer of a policy, which must have the same weights.

    `stored` are the types in which the policy's files hold its tensors. Raises Unusable with the reason.
    """
    first = {name: tensor.clone() for name, tensor in trained_weights(trainer.model).items()}
    try:
        restore(trainer, verified_checkpoint(path))
    except NousCoderError as error:
        raise Unusable(f"{_KEY}: {error}") from error
    for name, weight in trained_weights(trainer.model).items():
        if not _rounds_to(weight, first[name], stored.get(name)):
            raise Unusable(
                f"{_KEY}: {path} is not the checkpoint of the policy in policy.path ({name} differs):"
                " export the policy of the same version with nouscoder export"
            )
    trainer.step = 0


def _rounds_to(weight: Tensor, first: Tensor, stored: torch.dtype | None) -> bool:
    """Whether a weight has these values in the type that its policy folder stores."""
    if stored is None:  # the folder divides it among several tensors
        return True
    return torch.equal(own_part(weight).to(stored).to(first.dtype), own_part(first))


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
    one, or their teacher. Raises CheckpointError and Unusable, the latter also for a model whose
    log-probabilities the learner does not compute right (model/admission.py).
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
    trainer.admit()
    return trainer
