"""Checks the files of a policy against the architecture of the policy folder, before an engine stops for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from nouscoder.generation.engines.base import EngineError, EngineUnusable
from nouscoder.policy_folder.experts import split_experts

Shape = tuple[int, ...]


class Architecture:
    """The parameters of a model: their names and shapes, and which names are one tied tensor."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/config.json. Raises EngineUnusable. No weights are made."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        build: Any = AutoModelForCausalLM.from_config
        try:
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
            with torch.device("meta"):
                model = build(config)
        except (OSError, ValueError) as error:
            raise EngineUnusable(f"{folder} holds no config.json of a model: {str(error).splitlines()[0]}") from error
        parameters = split_experts(dict(model.named_parameters(remove_duplicate=False)))
        self._shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self._tensor_of = {name: id(tensor) for name, tensor in parameters.items()}
        self._parameters = parameters  # an id is unique only while its object lives
        self.max_tokens: int = config.max_position_embeddings

    def check(self, files: Sequence[Path], source: str) -> None:
        """Read every tensor of the files once. `source` names the policy in messages.

        Raises EngineError for a file that cannot be read or is not whole, a name that is unknown, missing or in two
        files, a wrong shape, and a value that is not finite.
        """
        found: dict[str, Path] = {}
        for file in files:
            try:
                self._check_file(file, found, source)
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{file} holds no readable weights: {error}") from error
        covered = {self._tensor_of[name] for name in found}
        missing = sorted(name for name, tensor in self._tensor_of.items() if tensor not in covered)
        if missing:
            raise EngineError(f"{source}: {missing[0]} is missing")

    def _check_file(self, file: Path, found: dict[str, Path], source: str) -> None:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a shard is not iterable
                if name not in self._shapes:
                    raise EngineError(f"{source}: {name} is not a parameter of the policy")
                if name in found:
                    raise EngineError(f"{file}: {name} is in another shard too")
                found[name] = file
                tensor = shard.get_tensor(name)
                if tuple(tensor.shape) != self._shapes[name]:
                    wanted, given = list(self._shapes[name]), list(tensor.shape)
                    raise EngineError(f"{source}: {name} has shape {given}, the policy needs {wanted}")
                if not bool(torch.isfinite(tensor).all()):
                    raise EngineError(f"{source}: {name} holds values that are not finite")
