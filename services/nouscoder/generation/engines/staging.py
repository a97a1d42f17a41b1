"""Checks the files of a policy against the architecture of the policy folder, before an engine stops for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nouscoder.generation.engines.base import EngineError, EngineUnusable
from nouscoder.policy_folder.policy_tensors import PolicyTensors, split_experts
from nouscoder.policy_folder.weights_files import FileState, WeightsUnusable

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
        self._checked_base: tuple[tuple[Path, FileState], ...] = ()
        self.max_tokens: int = config.max_position_embeddings

    def check(self, files: Sequence[Path], source: str) -> None:
        """Read every tensor of the files once. `source` names the policy in messages.

        Of an adapter whose base was checked before, only the tensors are read that it changes.

        Raises EngineError for a file that cannot be read or is not whole, an adapter of other weights, a name that is
        unknown, missing or in two files, a wrong shape, and a value that is not finite.
        """
        try:
            policy = PolicyTensors(files)
            unknown = sorted(policy.names - self._shapes.keys())
            if unknown:
                raise EngineError(f"{source}: {unknown[0]} is not a parameter of the policy")
            is_base_checked = bool(policy.base) and policy.base == self._checked_base
            for name, tensor in policy.read(policy.changed if is_base_checked else None):
                self._check_shape(name, tuple(tensor.shape), source)
                if not bool(torch.isfinite(tensor).all()):
                    raise EngineError(f"{source}: {name} holds values that are not finite")
        except WeightsUnusable as error:
            raise EngineError(str(error)) from error
        self._check_whole(policy.names, source)
        self._checked_base = policy.base

    def check_shapes(self, shapes: Mapping[str, Shape], source: str) -> None:
        """Check tensors whose values are checked elsewhere. Raises EngineError as `check` does."""
        for name, shape in shapes.items():
            self._check_shape(name, shape, source)
        self._check_whole(shapes, source)

    def _check_whole(self, found: Iterable[str], source: str) -> None:
        covered = {self._tensor_of[name] for name in found}
        missing = sorted(name for name, tensor in self._tensor_of.items() if tensor not in covered)
        if missing:
            raise EngineError(f"{source}: {missing[0]} is missing")

    def _check_shape(self, name: str, shape: Shape, source: str) -> None:
        if name not in self._shapes:
            raise EngineError(f"{source}: {name} is not a parameter of the policy")
        if shape != self._shapes[name]:
            wanted, given = list(self._shapes[name]), list(shape)
            raise EngineError(f"{source}: {name} has shape {given}, the policy needs {wanted}")
