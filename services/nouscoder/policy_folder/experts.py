"""Layers with experts (Qwen3-MoE): their routers, and the two forms of their weights.

A Hugging Face folder holds each expert's matrices alone:

    model.layers.0.mlp.experts.5.{gate,up,down}_proj.weight

A model of transformers holds those of all experts of a layer together:

    model.layers.0.mlp.experts.gate_up_proj [experts, 2 * width, hidden]    (gate first)
    model.layers.0.mlp.experts.down_proj    [experts, hidden, width]
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

_OF_ONE = re.compile(r"(?P<layer>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight")
_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of the layers with experts, in the order of the layers; none for a dense model."""
    return [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]


def split_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights, named as in a Hugging Face folder. Those of experts are views."""
    split: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        layer = name.rpartition(".")[0]
        if name.endswith(_GATE_UP):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                split |= {f"{layer}.{expert}.gate_proj.weight": gate, f"{layer}.{expert}.up_proj.weight": up}
        elif name.endswith(_DOWN):
            split |= {f"{layer}.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            split[name] = tensor
    return split


def merge_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `split_experts`. Raises ValueError when an expert lacks a matrix, or has one of another shape."""
    merged: dict[str, Tensor] = {}
    experts: defaultdict[str, dict[tuple[str, int], Tensor]] = defaultdict(dict)
    for name, tensor in weights.items():
        if match := _OF_ONE.fullmatch(name):
            experts[match["layer"]][match["kind"], int(match["expert"])] = tensor
        else:
            merged[name] = tensor
    for layer, matrices in experts.items():
        count = 1 + max(expert for _, expert in matrices)
        gates, ups, downs = (_all_of(layer, kind, count, matrices) for kind in ("gate", "up", "down"))
        try:
            merged[f"{layer}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
            merged[f"{layer}.down_proj"] = torch.stack(downs)
        except RuntimeError as error:
            raise ValueError(f"the experts of {layer} have different shapes: {error}") from error
    return merged


def _all_of(layer: str, kind: str, count: int, matrices: dict[tuple[str, int], Tensor]) -> list[Tensor]:
    missing = next((expert for expert in range(count) if (kind, expert) not in matrices), None)
    if missing is not None:
        raise ValueError(f"{layer}.{missing}.{kind}_proj.weight is missing")
    return [matrices[kind, expert] for expert in range(count)]
