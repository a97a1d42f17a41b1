"""The architecture of a policy folder, and the check of a policy against it. Every engine but the fake one has it.

INVARIANT: a policy that passes has each parameter of the architecture once, in its shape, with finite values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nouscoder.generation.engines.base import EngineError, EngineUnusable
from nouscoder.policy_folder.finite_values import not_finite_in_file
from nouscoder.policy_folder.policy_tensors import PolicyTensors, as_stored, tied_names, unread_names
from nouscoder.policy_folder.pretrained import build_model, load_pretrained
from nouscoder.policy_folder.weights_files import (
    ADAPTER_FILE,
    FileState,
    WeightsMissing,
    WeightsUnusable,
    stored_weights,
)

Shape = tuple[int, ...]


class Parameters:
    """The parameters of a model, by name, and which names are one tied tensor (`tied`)."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        """`tensors`: a tied one is the same object under each of its names."""
        self.tensors = tensors
        self._tensor_of = {name: id(tensor) for name, tensor in tensors.items()}
        self.tied = tied_names(self._tensor_of)

    @property
    def device(self) -> torch.device:
        """That of the first one."""
        return next(iter(self.tensors.values())).device

    def check_shapes(self, shapes: Mapping[str, Shape], source: str, *, is_whole: bool = True) -> None:
        """Raises EngineError for an unknown name, a wrong shape, and if it `is_whole` for a name that is missing.

        `source` names the policy in messages.
        """
        for name, shape in shapes.items():
            if name not in self.tensors:
                raise EngineError(f"{source}: {name} is not a parameter of the policy")
            if shape != self.tensors[name].shape:
                wanted = list(self.tensors[name].shape)
                raise EngineError(f"{source}: {name} has shape {list(shape)}, the policy needs {wanted}")
        covered = {self._tensor_of[name] for name in shapes}  # tied ones are saved once
        missing = sorted(name for name, tensor in self._tensor_of.items() if tensor not in covered)
        if missing and is_whole:
            raise EngineError(f"{source}: {missing[0]} is missing")


def model_config(folder: Path) -> Any:
    """`folder`/config.json, as transformers reads it. Raises EngineUnusable."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return load_pretrained(AutoConfig, folder)
    except (OSError, ValueError) as error:
        raise _no_config(folder, error) from error


def _no_config(folder: Path, error: Exception) -> EngineUnusable:
    reason = str(error).splitlines()[0] if folder.exists() else "there is no such folder"
    return EngineUnusable(f"{folder} holds no config.json of a model: {reason}")


class Architecture(Parameters):
    """The parameters of the model in a policy folder, as its files name them."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/config.json. Raises EngineUnusable. No weights are made."""
        config = model_config(folder)
        try:
            with torch.device("meta"):
                model = build_model(AutoModelForCausalLM, config, attn_implementation="eager")
        except (OSError, ValueError) as error:
            raise _no_config(folder, error) from error
        super().__init__({})
        self._model = model
        with suppress(WeightsMissing, WeightsUnusable):  # where only config.json is, the first policy has the names
            self._name({name: span.shape for name, (_, span) in stored_weights(folder).items()})
        self._checked_base: tuple[tuple[Path, FileState], ...] = ()
        self.max_tokens: int = getattr(config.get_text_config(), "max_position_embeddings", 2**31)  # Mamba has no end

    def _name(self, shapes: Mapping[str, Shape]) -> None:
        """Take the names of a policy's tensors. It has buffers too, and what the model does not read."""
        own = as_stored(self._model, self._model.state_dict(keep_vars=True), shapes)
        unread = unread_names(self._model, shapes, own)
        super().__init__(own | {name: torch.empty(shapes[name], device="meta") for name in unread})

    def check_shapes(self, shapes: Mapping[str, Shape], source: str, *, is_whole: bool = True) -> None:
        """As that of Parameters. The first policy has the names where the folder has none."""
        if not self.tensors:
            self._name(shapes)
        super().check_shapes(shapes, source, is_whole=is_whole)

    def check(self, files: Sequence[Path], source: str) -> None:
        """Read all bytes of the files once, but of an adapter whose base was checked before, only what it changes.

        It runs beside a busy event loop, so of whole weights only headers are checked tensor by tensor. Raises
        EngineError for a file that cannot be read or is not whole, an adapter of other weights, a name that is unknown,
        missing or in two files, a wrong shape, and a value that is not finite.
        """
        try:
            policy = PolicyTensors(files)
            self.check_shapes(policy.shapes, source)
            policy.check_tied(self.tied, source)
            is_base_checked = bool(policy.base) and policy.base == self._checked_base
            wholes = [] if is_base_checked else [file for file in files if file.name != ADAPTER_FILE]
            found = next((name for file in wholes if (name := not_finite_in_file(file))), None) or next(
                (name for name, tensor in policy.read(policy.changed) if not bool(torch.isfinite(tensor).all())), None
            )
        except WeightsUnusable as error:
            raise EngineError(str(error)) from error
        if found:
            raise EngineError(f"{source}: {found} holds values that are not finite")
        self._checked_base = policy.base
