"""How the decoder layers run: compiled, and with activation checkpointing.

torch.compile makes one set of graphs of the decoder layers, for all layers and for rows of any length. Attention stays
outside the graphs. How often it calls SDPA depends on how many rollouts of which lengths a row holds (packing.py), so
inside a graph each new row would be compiled again. Lengths are symbols (`dynamic=True`), and everything else of a
layer is compiled: norms, projections, RoPE, MLP.

With activation checkpointing the backward pass computes the activations of each decoder layer again: Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. Gradients do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import varlen as _varlen  # noqa: F401 - defines an operation that is kept
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from nouscoder.config import ActivationCheckpointing
from nouscoder.learner.model.packed_attention import packs


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the forward and backward pass of each decoder layer at its first use. Names and weights stay.

    Call it before activation checkpointing, which computes a whole compiled layer again. Raises ValueError for an
    architecture whose layers are not in `model.base_model.layers`.
    """
    layers = _layers_of(model, "compile")
    if packs(model):
        attention: Any = model.config._attn_implementation
        uncompiled = f"{attention}_uncompiled"
        functions: Any = AttentionInterface()  # type: ignore[no-untyped-call]
        functions.register(uncompiled, torch.compiler.disable(functions[attention]))  # type: ignore[no-untyped-call]
        model.set_attn_implementation(uncompiled)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _layers_of(model: PreTrainedModel, setting: str) -> nn.ModuleList:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"learner.{setting} does not know the layers of {type(model).__name__}")
    return layers


_ATEN = torch.ops.aten

_OF_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}

# Matrix products and attention are most of the arithmetic of a layer, and a small part of its activations. Attention
# stays outside of compiled layers (see above), so it can be kept there too.
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
    for layer in _layers_of(model, "activation_checkpointing")[: num_layers or None]:
        # `forward` and not `__call__`, so that hooks of the layer, such as those of FSDP, run once.
        layer.forward = partial(_checkpointed, layer.forward, kind)


def _checkpointed(forward: Callable[..., Any], kind: ActivationCheckpointing, *inputs: Any, **more: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **more)
    extra: dict[str, Any] = {}
    if kept := _KEPT.get(kind):
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    # The inputs of the layers are all that full checkpointing keeps. OFFLOADED keeps them in the CPU's memory.
    is_offloaded = kind is ActivationCheckpointing.OFFLOADED
    with save_on_cpu(pin_memory=torch.cuda.is_available()) if is_offloaded else nullcontext():
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **extra, **more)


def _policy(kept: Set[object], context: object, operation: object, *inputs: object, **more: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
