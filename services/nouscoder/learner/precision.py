"""Computes in one type and trains float32 masters: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740.

The masters are the weights of the trainer's model: the optimizer changes them, and checkpoints and published policies
hold them. One process computes with a copy of the model, whose gradients are added up in the masters. Of several ranks
FSDP2 does the same: it rounds the weights that it gathers (ranks.py).

INVARIANT: whenever a pass begins, each weight of the copy is its master, rounded to the type of the computation. A
frozen weight exists once, in that type.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nouscoder.config import ComputeType, LearnerSection, OptimizerStates

_DTYPES = {ComputeType.FLOAT32: torch.float32, ComputeType.BFLOAT16: torch.bfloat16}


def compute_dtype(settings: LearnerSection) -> torch.dtype:
    """The type of the forward and the backward pass."""
    return _DTYPES[settings.dtype]


def needs_copy(settings: LearnerSection) -> bool:
    """Whether one process computes with a copy, of another type or on another device than the masters."""
    return settings.dtype is not ComputeType.FLOAT32 or settings.optimizer_states is OptimizerStates.CPU


def round_weights(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Give all weights of the model this type and device. Buffers, such as the frequencies of RoPE, keep their type."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    return _with_buffers_at(model, device)


def _with_buffers_at(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model


class ComputeCopy:
    """The copy of a model that computes. `model` is the copy."""

    def __init__(
        self, masters: PreTrainedModel, dtype: torch.dtype, device: torch.device, masters_at: torch.device
    ) -> None:
        """Copy `masters` to `device` and move them to `masters_at`. No weight is there a third time meanwhile."""
        copies: dict[int, nn.Parameter] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for master in masters.parameters():
            trained = master.requires_grad
            copied = copies[id(master)] = nn.Parameter(master.detach().to(device, dtype, copy=trained), trained)
            if not trained:
                master.data = copied.data
                continue
            master.data = master.data.to(masters_at)
            if device.type == "cuda" and masters_at.type == "cpu":
                master.data = master.data.pin_memory()
            copied.register_post_accumulate_grad_hook(partial(_hand_over, master))  # type: ignore[no-untyped-call]
            self._pairs.append((master, copied))
        self.model = _with_buffers_at(deepcopy(masters, memo=copies), device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters again. Call it after they have changed."""
        for master, copied in self._pairs:
            copied.copy_(master)


def _hand_over(master: Tensor, copied: Tensor) -> None:
    """Add the gradient of the copy to that of its master, in the type of the master."""
    gradient, copied.grad = copied.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.device, master.dtype)
    else:  # in the type of the master too, without a copy of the gradient in it
        master.grad.add_(gradient.to(master.device))
