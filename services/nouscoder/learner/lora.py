"""Low-rank adapters: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.

An adapted layer computes

    y = x W^T + b + alpha / rank * (x A^T) B^T,    W [out, in] frozen, A [rank, in] and B [out, rank] trained,

which is the layer with the weight W + alpha / rank * B A. B begins as 0, so the first policy is that of W. There is no
dropout: the ratios of a step need exactly the distribution that was sampled from.

INVARIANT: with adapters the optimizer changes only A and B, and a checkpoint holds only them. Every other
weight is that of the first policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel

from nouscoder.config import LoraSection
from nouscoder.policy_folder.policy_tensors import Adapter, merged

LORA_A, LORA_B = "lora_a", "lora_b"


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. It has the weight, the bias and their names of the layer that it replaces."""

    def __init__(self, layer: nn.Linear, settings: LoraSection, chance: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.alpha, self.scale = settings.alpha, settings.alpha / settings.rank
        a = torch.empty(settings.rank, layer.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=chance)
        self.lora_a = nn.Parameter(a.to(layer.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, settings.rank, device=layer.weight.device))

    def forward(self, states: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        change = F.linear(F.linear(states, self.lora_a), self.lora_b)
        return F.linear(states, self.weight, self.bias) + self.scale * change


def add_adapters(model: PreTrainedModel, settings: LoraSection, seed: int) -> None:
    """Freeze the model and give each of its target layers an adapter, the same ones for the same seed.

    Does nothing for rank 0. Raises ValueError for a target that is no linear layer of the decoder.
    """
    if not settings.rank:
        return
    model.requires_grad_(False)
    chance = torch.Generator().manual_seed(seed)
    missing = set(settings.target_modules)
    for parent in list(model.base_model.modules()):
        for name, layer in list(parent.named_children()):
            if name in settings.target_modules and isinstance(layer, nn.Linear):
                setattr(parent, name, LoraLinear(layer, settings, chance))
                missing.discard(name)
    if missing:
        raise ValueError(
            f"learner.lora.target_modules: {sorted(missing)[0]} is no linear layer of the policy's decoder"
        )


def merge_adapters(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` of the model, whole and by name, with the adapters inside the weights of their layers, in float32."""
    result = {name: tensor for name, tensor in weights.items() if not name.endswith((LORA_A, LORA_B))}
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            a, b = weights[f"{path}.{LORA_A}"], weights[f"{path}.{LORA_B}"]
            result[f"{path}.weight"] = merged(weights[f"{path}.weight"], a, b, layer.scale)
    return result


def adapter_of(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Adapter:
    """The adapter of a model that has one. `weights` has its trained tensors, whole and by name."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LoraLinear)}
    matrices = {path: (weights[f"{path}.{LORA_A}"], weights[f"{path}.{LORA_B}"]) for path in layers}
    return Adapter(next(iter(layers.values())).alpha, matrices)
