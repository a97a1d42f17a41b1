"""Replaces the weights of a model by those of a published policy.

INVARIANT: after `load` the parameters are the tensors of the policy's files, each rounded to its parameter's type.
After an error they are what they were before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from nouscoder.generation.engines.base import EngineError
from nouscoder.policy_folder.policy_tensors import PolicyTensors, merge_experts
from nouscoder.policy_folder.weights_files import FileState, WeightsUnusable


class ModelWeights:
    """The weights of `model`, which are changed in place.

    Of an adapter whose base is in the model already, only the tensors are read that this adapter or the one before it
    changes. They are computed from the base.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters: dict[str, Tensor] = model.state_dict()
        self._base: tuple[tuple[Path, FileState], ...] = ()  # of the adapter in use; () for whole weights
        self._changed: frozenset[str] = frozenset()

    def load(self, files: Sequence[Path], source: str) -> None:
        """Load the policy in these files; `source` names it in messages.

        Raises EngineError for a file that cannot be read, weights that do not fit the model or the adapter, and values
        that are not finite.
        """
        try:
            policy = PolicyTensors(files)
            is_base_here = bool(policy.base) and policy.base == self._base
            names = policy.changed | self._changed if is_base_here else None
            weights = dict(policy.read(names, next(iter(self._parameters.values())).device))
        except WeightsUnusable as error:
            raise EngineError(str(error)) from error
        try:
            weights = merge_experts(weights)
        except ValueError as error:
            raise EngineError(f"{files[0].parent}: {error}") from error
        self._check(weights, source)
        if not is_base_here:
            self._check_all_are_there(weights, source)
        with torch.no_grad():
            for name, tensor in weights.items():
                self._parameters[name].copy_(tensor)
        self._base, self._changed = policy.base, policy.changed

    def _check(self, weights: dict[str, Tensor], source: str) -> None:
        unknown = sorted(set(weights) - set(self._parameters))
        if unknown:
            raise EngineError(f"{source}: {unknown[0]} is not a parameter of the policy")
        for name, tensor in weights.items():
            if tensor.shape != self._parameters[name].shape:
                wanted, found = list(self._parameters[name].shape), list(tensor.shape)
                raise EngineError(f"{source}: {name} has shape {found}, the policy needs {wanted}")
            if not bool(torch.isfinite(tensor).all()):
                raise EngineError(f"{source}: {name} holds values that are not finite")

    def _check_all_are_there(self, weights: dict[str, Tensor], source: str) -> None:
        # Tied parameters share storage and are saved once.
        covered = {self._parameters[name].data_ptr() for name in weights}
        missing = sorted(name for name, tensor in self._parameters.items() if tensor.data_ptr() not in covered)
        if missing:
            raise EngineError(f"{source}: {missing[0]} is missing")
