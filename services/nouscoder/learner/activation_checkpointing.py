"""Activation checkpointing: the backward pass computes the activations of each decoder layer again.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. Gradients do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import varlen as _varlen  # noqa: F401 - defines an operation that is kept
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from nouscoder.config import ActivationCheckpointing

_ATEN = torch.ops.aten
_OF_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}
# Matrix products and attention are most of the arithmetic of a layer, and a small part of its activations. Attention
# stays outside of compiled layers (compilation.py), so it can be kept there too.
_KEPT = {
    ActivationCheckpointing.SELECTIVE: {_ATEN.mm.default, _ATEN.addmm.default, *_OF_ATTENTION},
    ActivationCheckpointing.ATTENTION: _OF_ATTENTION,
}


def checkpoint_activations(model: PreTrainedModel, kind: ActivationCheckpointing, num_layers: int = 0) -> None:
    """Checkpoint the first `num_layers` decoder layers of the model, 0: all. Call it once. Names and weights stay.

    Raises ValueError for an architecture whose layers are not in `model.base_model.layers`.
    """
    if kind is ActivationCheckpointing.NONE:
        return
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"learner.activation_checkpointing does not know the layers of {type(model).__name__}")
    for layer in layers[: num_layers or None]:
        # `forward` and not `__call__`, so that hooks of the layer, such as those of FSDP, run once.
        layer.forward = partial(_checkpointed, layer.forward, kind)


def _checkpointed(forward: Callable[..., Any], kind: ActivationCheckpointing, *inputs: Any, **more: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **more)
    extra: dict[str, Any] = {}
    if kept := _KEPT.get(kind):
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    with _where_inputs_are_kept(kind):
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **extra, **more)


def _policy(kept: Set[object], context: object, operation: object, *inputs: object, **more: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _where_inputs_are_kept(kind: ActivationCheckpointing) -> AbstractContextManager[object]:
    """The inputs of the layers are all that full checkpointing keeps. OFFLOADED keeps them in the CPU's memory."""
    if kind is ActivationCheckpointing.OFFLOADED:
        return save_on_cpu(pin_memory=torch.cuda.is_available())
    return nullcontext()
