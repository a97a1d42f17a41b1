"""Low-rank adapters of a policy (arXiv 2106.09685): a few small matrices that change the weights of a base.

The folder of an adapter has PEFT's form: adapter_config.json, and adapter_model.safetensors with two matrices of each
adapted layer, by the path of the layer:

    base_model.model.PATH.lora_A.weight [rank, in]      base_model.model.PATH.lora_B.weight [out, rank]

The weight of the layer becomes W + alpha / rank * B A. The metadata of the file have alpha, and the digest of the base.

INVARIANT: an adapter that does not fit its base is refused as a whole, before any weight is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nouscoder.policy_folder.weights_files import WeightsUnusable

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# One entry, because safetensors writes several in any order, and equal adapters must have equal bytes.
_METADATA = "nouscoder_adapter"


@dataclass(frozen=True)
class Adapter:
    """`matrices`: A [rank, in] and B [out, rank] of each layer, by its path. `base_digest`: see PolicyManifest."""

    alpha: float
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    base_digest: str = ""

    @cached_property
    def changes(self) -> frozenset[str]:
        """The names of the weights that it changes."""
        return frozenset(f"{path}.weight" for path in self.matrices)

    def merged_into(self, name: str, weight: Tensor, device: torch.device) -> Tensor:
        """The weight of this name with the adapter's change, in its own type, computed on `device`.

        It is `weight` itself when the adapter does not change it.
        """
        if name not in self.changes:
            return weight
        a, b = self.matrices[name.removesuffix(".weight")]
        return merged(weight.to(device), a.to(device), b.to(device), self.alpha / len(a)).to(weight.dtype)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of its file, by name."""
        named: dict[str, Tensor] = {}
        for path, (a, b) in self.matrices.items():
            named |= {f"{_PREFIX}{path}{_A}": a, f"{_PREFIX}{path}{_B}": b}
        return named

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of its file."""
        return {_METADATA: json.dumps({"alpha": self.alpha, "base": self.base_digest})}

    def config(self, base: str) -> str:
        """The text of adapter_config.json. `base` is the name or the folder of the base."""
        rank = len(next(iter(self.matrices.values()))[0])
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted({path.rpartition(".")[2] for path in self.matrices}),
            "bias": "none",
            "inference_mode": True,
        }
        return json.dumps(fields, indent=1) + "\n"


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale * b a, in float32. weight [out, in], a [rank, in], b [out, rank]."""
    return weight.float().addmm(b.float(), a.float(), alpha=scale)


def read_adapter(file: Path, shapes: Mapping[str, Sequence[int]]) -> Adapter:
    """The adapter in a file, for a base with weights of these shapes, by name. Raises WeightsUnusable."""
    try:
        with safe_open(file, framework="pt") as stored:
            about = json.loads((stored.metadata() or {})[_METADATA])
            alpha, base_digest = float(about["alpha"]), str(about["base"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is not iterable
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise WeightsUnusable(f"{file} holds no readable adapter: {error}") from error
    paths = sorted(name.removeprefix(_PREFIX).removesuffix(_A) for name in tensors if name.endswith(_A))
    if not paths or set(tensors) != {f"{_PREFIX}{path}{side}" for path in paths for side in (_A, _B)}:
        raise WeightsUnusable(f"{file} must hold two matrices of each adapted layer, and nothing else")
    matrices = {path: (tensors[f"{_PREFIX}{path}{_A}"], tensors[f"{_PREFIX}{path}{_B}"]) for path in paths}
    for path, (a, b) in matrices.items():
        fits = a.dim() == b.dim() == 2 and len(a) == b.shape[1]
        if not fits or [*shapes.get(f"{path}.weight", ())] != [len(b), a.shape[1]]:
            raise WeightsUnusable(f"{file} is an adapter of another policy: its matrices do not fit {path}")
    return Adapter(alpha, matrices, base_digest)
