"""Low-rank adapters (LoRA). Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.

An adapted layer has the weight W + alpha / rank * B A, with W [out, in] frozen and A [rank, in], B [out, rank] trained:

    y = x W^T + b + alpha / rank * (x A^T) B^T

B begins as 0, so the first policy is that of W. There is no dropout: the ratios of a step need exactly the distribution
that was sampled from. A linear layer adds the change to its output. Weights that a layer holds in another form are
changed before each of its passes: those of all experts of a layer, [experts, out, in], where each expert has an A and a
B of its own, and GPT-2's [in, out].

Without names, all linear layers of the decoder and its experts get adapters. Routers get none: generation and learner
would choose other experts for reasons that no merged weight shows. Embeddings, norms and convolutions are no products
with a matrix.

INVARIANT: with adapters the optimizer changes only A and B, and a checkpoint holds only them. Every other
weight is that of the first policy.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nouscoder.config import LoraSection
from nouscoder.errors import Unusable
from nouscoder.policy_folder.policy_tensors import Adapter, PolicyTensors, change_of
from nouscoder.policy_folder.pretrained import build_model, load_pretrained
from nouscoder.policy_folder.weights_files import weights_files

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
# Mamba's mixers read the weight of this layer and never call it.
_NEVER_CALLED = "dt_proj"


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. It has the weight, the bias and their names of the layer that it replaces."""

    def __init__(self, layer: nn.Linear, settings: LoraSection, chance: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_alpha, self.lora_scale, self.is_turned = settings.alpha, settings.alpha / settings.rank, False
        self.lora_a, self.lora_b = _matrices(layer.weight, settings.rank, chance)
        self.adapted = {"weight": ("lora_a", "lora_b")}

    def forward(self, states: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        change = F.linear(F.linear(states, self.lora_a), self.lora_b)
        return F.linear(states, self.weight, self.bias) + self.lora_scale * change


class LoraWeights(nn.Module):
    """A base class that a layer gets before its own class: its weights `adapted` are changed during a forward pass."""

    lora_alpha: float
    lora_scale: float
    is_turned: bool  # weights are [..., in, out]
    adapted: dict[str, tuple[str, str]]

    def adapt(self, names: Sequence[str], settings: LoraSection, chance: torch.Generator) -> None:
        """Give the weights of these names adapters. Call it once."""
        self.lora_alpha, self.lora_scale = settings.alpha, settings.alpha / settings.rank
        self.is_turned = isinstance(self, Conv1D) or bool(getattr(self, "is_transposed", False))
        self.adapted = {name: (f"{name}_lora_a", f"{name}_lora_b") for name in names}
        for name, sides in self.adapted.items():
            weight = self.get_parameter(name)
            matrices = _matrices(weight.mT if self.is_turned else weight, settings.rank, chance)
            for side, matrix in zip(sides, matrices, strict=True):
                self.register_parameter(side, matrix)

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """The forward pass of the layer with the changed weights, which stand before the layer's own meanwhile."""
        for name, (a, b) in self.adapted.items():
            change = change_of(self.get_parameter(a), self.get_parameter(b), is_turned=self.is_turned)
            vars(self)[name] = self.get_parameter(name) + self.lora_scale * change
        try:
            return super().forward(*inputs, **more)
        finally:
            for name in self.adapted:
                del vars(self)[name]


def _matrices(weight: Tensor, rank: int, chance: torch.Generator) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B of a weight [..., out, in]."""
    *experts, num_out, num_in = weight.shape
    b = torch.zeros(*experts, num_out, rank, device=weight.device)
    a = torch.empty(*experts, rank, num_in, device="meta" if weight.is_meta else "cpu")
    # As kaiming_uniform_ with a = sqrt(5) draws a matrix; of several experts it would count all as inputs.
    a.uniform_(-1 / math.sqrt(num_in), 1 / math.sqrt(num_in), generator=None if weight.is_meta else chance)
    return nn.Parameter(a.to(weight.device)), nn.Parameter(b)


def add_adapters(model: PreTrainedModel, settings: LoraSection, seed: int) -> str:
    """Freeze the model and give its target layers adapters, the same ones for the same seed.

    Does nothing for rank 0. Returns one sentence: which layers have adapters, and which share of the decoder stays
    frozen. Raises ValueError for a target that is no linear layer of the decoder.
    """
    if not settings.rank:
        return ""
    model.requires_grad_(False)
    chance, targets = torch.Generator().manual_seed(seed), set(settings.target_modules)
    found = [
        (path, layer, names) for path, layer, names in _layers(model) if targets or _ROUTERS.isdisjoint(path.split("."))
    ]
    missing = targets - {name for path, layer, names in found for name in _called(path, layer, names)}
    if missing:
        known = sorted({name for path, layer, names in _layers(model) for name in _called(path, layer, names)})
        raise ValueError(
            f"learner.lora.target_modules: {min(missing)} is no linear layer of the policy's decoder: leave the key out"
            f" for all of them and the experts, or choose among {', '.join(known)}"
        )
    for path, layer, names in found:
        chosen = [name for name in names if not targets or targets & _called(path, layer, [name])]
        parent, _, own = path.rpartition(".")
        if chosen and isinstance(layer, nn.Linear):
            setattr(model.get_submodule(parent), own, LoraLinear(layer, settings, chance))
        elif chosen:
            layer.__class__ = type(f"Lora{type(layer).__name__}", (LoraWeights, type(layer)), {})
            layer.adapt(chosen, settings, chance)
    return _sentence(model, settings.rank)


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, Any, list[str]]]:
    """The layers that can have adapters: path, layer, and the names of its matrices."""
    outer = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    inside = {id(module) for module in model.base_model.modules()} - {id(outer)}
    for path, layer in list(model.named_modules()):
        if id(layer) not in inside or path.endswith(_NEVER_CALLED):
            continue
        if isinstance(layer, nn.Linear | Conv1D):
            yield path, layer, ["weight"]
        elif stacked := [
            name
            for name, weight in layer.named_parameters(recurse=False)
            if weight.ndim == 3 and (name.endswith("_proj") or type(layer).__name__.endswith("Experts"))
        ]:
            yield path, layer, stacked


def _called(path: str, layer: nn.Module, names: Sequence[str]) -> set[str]:
    """The names by which `target_modules` reaches these matrices. Experts' files have gate and up apart, often."""
    if isinstance(layer, nn.Linear | Conv1D):
        return {path.rpartition(".")[2]}
    return {*names, *(("gate_proj", "up_proj") if "gate_up_proj" in names else ())}


def _sentence(model: PreTrainedModel, rank: int) -> str:
    sizes = sizes_of_kinds(model)
    total = sum(sizes.values())
    reached = sum(size for (_, has_adapter), size in sizes.items() if has_adapter) / total
    kinds, others = ([kind for (kind, has), _ in sizes.most_common() if has is wanted] for wanted in (True, False))
    frozen = [f"{kind} {share:.1%}" for kind in others[:3] if (share := sizes[kind, False] / total) >= 0.001]
    return (
        f"learner.lora: adapters of rank {rank} on {', '.join(kinds)}: {reached:.1%} of the decoder's weights; the"
        f" others stay frozen: {', '.join(frozen) or 'each less than 0.1%'}"
    )


def sizes_of_kinds(model: PreTrainedModel) -> Counter[tuple[str, bool]]:
    """How many weights the decoder has of each kind with an adapter (True) and without, but embeddings and head."""
    sizes: Counter[tuple[str, bool]] = Counter()
    outer: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Embedding) or layer is outer:
            continue
        adapted: Mapping[str, tuple[str, str]] = getattr(layer, "adapted", {})
        own = {side for sides in adapted.values() for side in sides}
        for name, weight in layer.named_parameters(recurse=False):
            if name not in own:
                parts = [part for part in (*path.split("."), name) if part != "weight"]
                sizes[".".join(parts[-2:] if "experts" in parts else parts[-1:]), name in adapted] += weight.numel()
    return sizes


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """The layers with adapters, by path: LoraLinear or LoraWeights."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, LoraLinear | LoraWeights)}


def adapter_of(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Adapter:
    """The model's adapter, of these values of A and B by name. Experts have their matrices alone, as in PEFT's form."""
    layers = adapted_layers(model)
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    for path, layer in layers.items():
        for name, (side_a, side_b) in layer.adapted.items():
            a, b = weights[f"{path}.{side_a}"], weights[f"{path}.{side_b}"]
            if a.ndim == 2:
                matrices[path] = (a, b)
                continue
            for expert in range(len(a)):
                halves = b[expert].chunk(2) if name == "gate_up_proj" else [b[expert]]
                kinds = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
                for kind, half in zip(kinds, halves, strict=True):
                    # Copies, because a file holds no two tensors in the same memory.
                    matrices[f"{path}.{expert}.{kind}"] = (a[expert].clone(), half.clone())
    return Adapter(next(iter(layers.values())).lora_alpha, matrices)


def refuse_unstored(model: PreTrainedModel, adapter: Adapter, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises Unusable when the first policy's files, with weights of these shapes, hold a weight in another form."""
    turned = {path for path, layer in adapted_layers(model).items() if layer.is_turned}
    for path, (a, b) in adapter.matrices.items():
        if path in turned or [*shapes.get(f"{path}.weight", ())] != [len(b), a.shape[1]]:
            raise Unusable(
                f"learner.lora.publication: the policy's files hold {path} in another form, for which no adapter is"
                ' written: take "merged", or leave the layer out of learner.lora.target_modules'
            )


def said_of_adapters(folder: Path, settings: LoraSection) -> str:
    """The sentence of `add_adapters` about the policy in a folder, whose weights are not loaded.

    Raises ValueError, OSError or KeyError for a policy that cannot have these adapters, and Unusable.
    """
    with torch.device("meta"):
        model: PreTrainedModel = build_model(AutoModelForCausalLM, load_pretrained(AutoConfig, folder))
    sentence = add_adapters(model, settings, 0)
    if settings.publishes_adapters:
        shapes = PolicyTensors(weights_files(folder)).shapes
        refuse_unstored(model, adapter_of(model, dict(model.named_parameters())), shapes)
    return sentence


def say_stdin() -> None:
    """Answer a request on stdin, {"folder", "settings"}, in JSON on stdout: {"sentence"}, or {"fault"}."""
    request = json.load(sys.stdin)
    try:
        sentence = said_of_adapters(Path(request["folder"]), LoraSection.model_validate(request["settings"]))
        answer = {"sentence": sentence}
    except (Unusable, ValueError, OSError, KeyError) as error:
        answer = {"fault": str(error)}
    sys.stdout.write(json.dumps(answer))
