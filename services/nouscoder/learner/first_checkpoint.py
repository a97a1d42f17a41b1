"""A new run that begins with the checkpoint of another run: its weights, its optimizer's moments, its entropy control.

The first policy of the new run must be that of the checkpoint's version, as `nouscoder export` writes it. It is what is
sampled from first, and the reference policy. The steps of the new run, and so its learning rate's schedule, begin at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.checkpoint import restore, verified_checkpoint
from nouscoder.learner.ranks import own_part
from nouscoder.learner.trainer import Trainer
from nouscoder.learner.weights import trained_weights

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
