"""Copies published weights into the parameters of a model: all of them, or none after an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nouscoder.generation.engines.base import EngineError
from nouscoder.policy_folder.experts import merge_experts


def read_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of all shards, named as in the model.

    Raises EngineError naming the file that cannot be read or repeats a tensor, or an expert that is not whole.
    """
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            shard = load_file(file)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{file} holds no readable weights: {error}") from error
        twice = sorted(weights.keys() & shard.keys())
        if twice:
            raise EngineError(f"{file}: {twice[0]} is in another shard too")
        weights |= shard
    try:
        return merge_experts(weights)
    except ValueError as error:
        raise EngineError(f"{files[0].parent}: {error}") from error


def copy_weights(model: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Copy `weights` into `model` in place. Raises EngineError, and changes nothing, for unusable weights."""
    parameters: dict[str, Tensor] = model.state_dict()
    _check_names(parameters, weights, source)
    for name, tensor in weights.items():
        if tensor.shape != parameters[name].shape:
            wanted, found = list(parameters[name].shape), list(tensor.shape)
            raise EngineError(f"{source}: {name} has shape {found}, the policy needs {wanted}")
        if not bool(torch.isfinite(tensor).all()):
            raise EngineError(f"{source}: {name} holds values that are not finite")
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)


def _check_names(parameters: dict[str, Tensor], weights: dict[str, Tensor], source: str) -> None:
    unknown = sorted(set(weights) - set(parameters))
    if unknown:
        raise EngineError(f"{source}: {unknown[0]} is not a parameter of the policy")
    # Tied parameters share storage and are saved once.
    covered = {parameters[name].data_ptr() for name in weights}
    missing = sorted(name for name, tensor in parameters.items() if tensor.data_ptr() not in covered)
    if missing:
        raise EngineError(f"{source}: {missing[0]} is missing")
