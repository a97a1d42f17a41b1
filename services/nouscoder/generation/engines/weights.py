"""Published weights -> a model's parameters, all or nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nouscoder.generation.engines.base import WEIGHTS_FILE, EngineError


def read_weights(folder_or_file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file (a folder means its model.safetensors). Raises EngineError naming the file."""
    file = folder_or_file / WEIGHTS_FILE if folder_or_file.is_dir() else folder_or_file
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{file} holds no weights that can be read: {error}") from error


def copy_weights(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Copy `weights` into `model` in place. Raises EngineError and changes nothing when one does not fit or is NaN."""
    parameters: dict[str, Tensor] = model.state_dict()
    _check_names(parameters, weights, source)
    for name, tensor in weights.items():
        if tensor.shape != parameters[name].shape:
            wanted, found = list(parameters[name].shape), list(tensor.shape)
            raise EngineError(f"{source}: {name} has the shape {found}, the policy needs {wanted}")
        if not bool(torch.isfinite(tensor).all()):
            raise EngineError(f"{source}: {name} holds values that are not finite")
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)


def _check_names(parameters: dict[str, Tensor], weights: dict[str, Tensor], source: Path) -> None:
    unknown = sorted(set(weights) - set(parameters))
    if unknown:
        raise EngineError(f"{source}: {unknown[0]} is no parameter of the policy")
    # Tied parameters share storage and are saved once.
    covered = {parameters[name].data_ptr() for name in weights}
    missing = sorted(name for name, tensor in parameters.items() if tensor.data_ptr() not in covered)
    if missing:
        raise EngineError(f"{source}: {missing[0]} is missing")
