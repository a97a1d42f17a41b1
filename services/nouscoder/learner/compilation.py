"""torch.compile of the decoder layers: one set of graphs for all layers and for rows of any length.

Attention stays outside the graphs. How often it calls SDPA depends on how many rollouts of which lengths a row holds
(packed_attention.py), so inside a graph each new row would be compiled again. Lengths are symbols (`dynamic=True`), and
everything else of a layer is compiled: norms, projections, RoPE, MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the forward and backward pass of each decoder layer at its first use. Names and weights stay.

    Call it before activation checkpointing, which computes a whole compiled layer again. Raises ValueError for an
    architecture whose layers are not in `model.base_model.layers`.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"learner.compile does not know the layers of {type(model).__name__}")
    attention: Any = model.config._attn_implementation
    uncompiled = f"{attention}_uncompiled"
    functions: Any = AttentionInterface()  # type: ignore[no-untyped-call]
    functions.register(uncompiled, torch.compiler.disable(functions[attention]))  # type: ignore[no-untyped-call]
    model.set_attn_implementation(uncompiled)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
