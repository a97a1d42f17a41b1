"""The tensors of a policy, read from its files one at a time: whole weights, or a base with an adapter merged into it.

INVARIANT: each tensor of an adapter's policy is computed from the base, never from an earlier version, so rounding does
not add up over versions. Files that do not fit together are refused before the first tensor is given, and an adapter
that does not fit its base is refused as a whole.

A low-rank adapter (arXiv 2106.09685) is a few small matrices that change the weights of a base. Its folder has PEFT's
form: adapter_config.json, and adapter_model.safetensors with two matrices of each adapted layer, by its path:

    base_model.model.PATH.lora_A.weight [rank, in]      base_model.model.PATH.lora_B.weight [out, rank]

The weight of the layer becomes W + alpha / rank * B A. The metadata of the file have alpha, and the digest of the base.

A Hugging Face folder holds each expert's matrices alone (Qwen3-MoE):

    model.layers.0.mlp.experts.5.{gate,up,down}_proj.weight

A model of transformers holds those of all experts of a layer together:

    model.layers.0.mlp.experts.gate_up_proj [experts, 2 * width, hidden]    (gate first)
    model.layers.0.mlp.experts.down_proj    [experts, hidden, width]
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nouscoder.domain.policy import PolicyManifest
from nouscoder.policy_folder.pretrained import untied
from nouscoder.policy_folder.weights_files import (
    ADAPTER_FILE,
    FileState,
    WeightsUnusable,
    is_ignored,
    policy_files,
    shards_of,
    state_of,
    weights_files,
)

_CPU = torch.device("cpu")
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# One entry, because safetensors writes several in any order, and equal adapters must have equal bytes.
_METADATA = "nouscoder_adapter"
_OF_ONE = re.compile(r"(?P<layer>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight")
_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


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
        """The weight with the adapter's change, computed on `device`; `weight` itself when it has none."""
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


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, is_turned: bool = False) -> Tensor:
    """weight + scale * b a, in float32. weight [..., out, in] or, turned, [..., in, out]."""
    return weight.float().add(change_of(a.float(), b.float(), is_turned=is_turned), alpha=scale)


def change_of(a: Tensor, b: Tensor, *, is_turned: bool) -> Tensor:
    """b a, [..., out, in] or, turned, [..., in, out]. a [..., rank, in], b [..., out, rank]."""
    return (b @ a).mT if is_turned else b @ a


def read_adapter(file: Path, shapes: Mapping[str, Sequence[int]]) -> Adapter:
    """The adapter in a file, for a base with weights of these shapes, by name. Raises WeightsUnusable."""
    try:
        with safe_open(file, framework="pt") as stored:
            about = json.loads((stored.metadata() or {})[_METADATA])
            alpha, base_digest = float(about["alpha"]), str(about["base"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is not iterable
    except KeyError:
        how = "merge it with PEFT (merge_and_unload), and give the whole folder"
        raise WeightsUnusable(
            f"{file} is not NousCoder's, so the weights that it changes are not known: {how}"
        ) from None
    except (OSError, SafetensorError, TypeError, ValueError) as error:
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


class PolicyTensors:
    """`shapes`: of all tensors, by name. `names`: theirs. `adapter`: that of the files, or None."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the names and shapes of the tensors, and the adapter, which is a file named ADAPTER_FILE.

        Raises WeightsUnusable for a file that cannot be read, repeats a tensor, or is an adapter of other weights.
        """
        self._files = [file for file in files if file.name != ADAPTER_FILE]
        self._states = tuple(map(_state, self._files))
        shapes: dict[str, list[int]] = {}
        for file in self._files:
            with _opened(file) as shard:
                for name in _used(shard):
                    if name in shapes:
                        raise WeightsUnusable(f"{file}: {name} is in another shard too")
                    shapes[name] = shard.get_slice(name).get_shape()
        adapters = [file for file in files if file.name == ADAPTER_FILE]
        self.adapter: Adapter | None = read_adapter(adapters[0], shapes) if adapters else None
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in shapes.items()}
        self.names = frozenset(shapes)

    @property
    def base(self) -> tuple[tuple[Path, FileState], ...]:
        """The files that the adapter changes, with their states; () without an adapter."""
        return () if self.adapter is None else tuple(zip(self._files, self._states, strict=True))

    @property
    def changed(self) -> frozenset[str]:
        """The names of the tensors that are not those of the base."""
        return frozenset() if self.adapter is None else self.adapter.changes

    def read(self, names: Container[str] | None = None, device: torch.device = _CPU) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with its name, or only those of these `names`. Raises WeightsUnusable.

        What an adapter changes is computed on `device` and stays there; the others are on the CPU.
        """
        for file in self._files:
            with _opened(file) as shard:
                for name in _used(shard):
                    if names is None or name in names:
                        tensor = shard.get_tensor(name)
                        yield name, tensor if self.adapter is None else self.adapter.merged_into(name, tensor, device)

    def check_tied(self, groups: Iterable[Collection[str]], source: str) -> None:
        """Raises WeightsUnusable when the files hold different values for the names of one tied tensor."""
        for group in groups:
            names = sorted(self.names & set(group))
            if len(names) > 1:
                tied = dict(self.read(names))
                for other in names[1:]:
                    if not torch.equal(tied[names[0]], tied[other]):
                        raise WeightsUnusable(untied(source, names[0], other))


def tied_names(tensors: Mapping[str, int]) -> list[list[str]]:
    """The groups of names that are one tensor, by a number that tells tensors apart."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        names[tensor].append(name)
    return [group for group in names.values() if len(group) > 1]


def write_merged(first: Path, folder: Path, to: Path) -> None:
    """Write into the folder `to` the weights of `first`, by their files, with the adapter in `folder` merged into them.

    Raises WeightsUnusable, also when the adapter is one of other weights of the same shapes, and WeightsMissing.
    """
    tensors = PolicyTensors(policy_files(folder, first))
    base = PolicyManifest(0, 0, str(first), shards_of(first)).digest
    if tensors.adapter is None or tensors.adapter.base_digest != base:
        raise WeightsUnusable(f"{folder / ADAPTER_FILE} is an adapter of other weights than those in {first}")
    for file in weights_files(first):
        with _opened(file) as shard:
            names = frozenset(_used(shard))
        save_file(dict(tensors.read(names)), to / file.name, {"format": "pt"})


def _used(shard: Any) -> list[str]:
    return [name for name in shard.keys() if not is_ignored(name)]  # noqa: SIM118 - a shard is not iterable


def _state(file: Path) -> FileState:
    try:
        return state_of(file)
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> WeightsUnusable:
    return WeightsUnusable(f"{file} holds no readable weights: {error}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of the layers with experts, in the order of the layers; none for a dense model."""
    # Importing a model of transformers takes seconds.
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

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


def as_stored(model: Any, weights: dict[str, Tensor], stored: Collection[str]) -> dict[str, Tensor]:
    """The weights of a model by the names of a folder's tensors: with their prefixes, and experts alone or together.

    Turns back what transformers does to these names when it reads them. Without names experts stand alone.
    """
    # Importing transformers takes seconds.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
        revert_weight_conversion,
    )

    split = split_experts(weights)
    if not stored or split.keys() <= set(stored):
        return split
    if getattr(model, "_weight_conversions", None) is None:  # it was not loaded from the folder
        conversions = get_model_conversion_mapping(model)
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in conversions if isinstance(one, WeightConverter)]
        for name in stored:
            rename_source_key(name, renamings, converters)
        model._weight_conversions = [one for one in conversions if one.was_used()]
    # A folder may have of a tied tensor only the other name, and no prefix where it was saved without the head.
    tied = {one: other for other, one in model.all_tied_weights_keys.items() if other in stored and one not in stored}
    named: dict[str, Tensor] = {}
    for name, tensor in revert_weight_conversion(model, dict(weights)).items():
        bare = tied.get(name, name.removeprefix(f"{model.base_model_prefix}."))
        named[bare if name not in stored and bare in stored else name] = tensor
    return named


def unread_names(model: Any, stored: Iterable[str], own: Container[str]) -> list[str]:
    """The names that a model, whose `own` names are given, does not read: of other towers, of heads for later tokens.

    A folder with them is whole only with them, and transformers knows that this model has no use for them.
    """
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return [name for name in stored if name not in own and any(pattern.search(name) for pattern in patterns)]


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
