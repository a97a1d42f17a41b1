"""Models in Hugging Face folders, and their weights as named tensors without tied duplicates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from nouscoder.errors import Unusable
from nouscoder.learner.model.adapters import adapted_layers, adapter_of
from nouscoder.learner.model.packed_attention import attend_packed
from nouscoder.learner.parallel.ranks import whole
from nouscoder.policy_folder.policy_tensors import Adapter, merged
from nouscoder.policy_folder.pretrained import build_model, load_pretrained, load_whole
from nouscoder.policy_folder.weights_files import WeightsMissing, WeightsUnusable, is_ignored, weights_files

# The names that safetensors gives to the types of weights that can be trained.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_model(folder: Path) -> PreTrainedModel:
    """The causal language model in `folder` (config.json, model.safetensors), in float32. Raises Unusable."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # stderr holds JSON lines
    try:
        with _naming(folder):
            model: PreTrainedModel = load_whole(AutoModelForCausalLM, folder, dtype=torch.float32)
    except (WeightsMissing, WeightsUnusable) as error:
        raise Unusable(str(error)) from error
    attend_packed(model)
    return model


def empty_model(folder: Path) -> PreTrainedModel:
    """The architecture of the policy in `folder`, without its weights. Raises Unusable."""
    with _naming(folder), torch.random.fork_rng(devices=[]):
        config = load_pretrained(AutoConfig, folder)
        model: PreTrainedModel = build_model(AutoModelForCausalLM, config, dtype=torch.float32)
    attend_packed(model)
    return model


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Raise what goes wrong with a folder as Unusable. transformers would take a missing one for a hub's name."""
    if not folder.is_dir():
        raise Unusable(f"{folder} is not a folder, so it holds no policy")
    try:
        if quantised := load_pretrained(AutoConfig, folder).to_dict().get("quantization_config"):
            raise ValueError(f"it is quantised ({quantised.get('quant_method')}): take the model's unquantised weights")
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).partition("\nModel type should be one of")[0]
        raise Unusable(f"{folder} does not hold a usable policy: {reason}") from error


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The type in which the weights files of `folder` hold each tensor, by name. Reads only the files' headers.

    Raises Unusable when a file cannot be read, or holds a type other than float32, bfloat16 and float16.
    """
    found: dict[str, torch.dtype] = {}
    try:
        for file in weights_files(folder):
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - a shard is not iterable
                    if is_ignored(name):
                        continue
                    stored = shard.get_slice(name).get_dtype()
                    if stored not in DTYPES:
                        raise Unusable(f"{file}: {name} is {stored}, and only {', '.join(DTYPES)} can be trained")
                    found[name] = DTYPES[stored]
    except (OSError, SafetensorError, WeightsMissing) as error:
        raise Unusable(f"{folder} does not hold a usable policy: {error}") from error
    return found


def own_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's own tensors, by name, possibly sharded. Of tied tensors only the first is included."""
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def trained_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of `own_weights` that are not frozen: what a checkpoint holds."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in own_weights(model).items() if name not in frozen}


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Whole contiguous tensors on the CPU, by name, with merged adapters. All ranks must call it together."""
    weights = {name: whole(tensor).cpu().contiguous() for name, tensor in own_weights(model).items()}
    for path, layer in adapted_layers(model).items():
        for name, sides in layer.adapted.items():
            a, b = (weights.pop(f"{path}.{side}") for side in sides)
            # At the beginning B is 0. The sum would change -0.0 to 0.0, and the first version is that of the files.
            if bool(b.any()):
                changed = f"{path}.{name}"
                weights[changed] = merged(weights[changed], a, b, layer.lora_scale, is_turned=layer.is_turned)
    return weights


def adapter_weights(model: PreTrainedModel) -> Adapter:
    """A copy of the model's adapter, on the CPU. All ranks must call it together."""
    weights = {name: whole(tensor).to("cpu", copy=True) for name, tensor in trained_weights(model).items()}
    return adapter_of(model, weights)


def put_weights(model: PreTrainedModel, weights: dict[str, Tensor], source: Path) -> None:
    """Load weights, named as in `trained_weights`. Raises Unusable naming `source` if they differ."""
    expected = set(trained_weights(model))
    if set(weights) != expected:
        odd = sorted(set(weights) ^ expected)[0]
        raise Unusable(f"{source} belongs to another model: {odd} is in only one of the two")
    try:
        model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise Unusable(f"{source} belongs to another model: {error}") from error
