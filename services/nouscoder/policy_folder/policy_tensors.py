"""The tensors of a policy, read from its files one at a time: whole weights, or a base with an adapter merged into it.

INVARIANT: each tensor of an adapter's policy is computed from the base, never from an earlier version, so rounding does
not add up over versions. Files that do not fit together are refused before the first tensor is given.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nouscoder.domain.policy import PolicyManifest
from nouscoder.policy_folder.adapter import Adapter, read_adapter
from nouscoder.policy_folder.weights_files import (
    ADAPTER_FILE,
    FileState,
    WeightsUnusable,
    policy_files,
    shards_of,
    state_of,
    weights_files,
)

_CPU = torch.device("cpu")


class PolicyTensors:
    """`names`: of all tensors. `adapter`: that of the files, or None."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the names and shapes of the tensors, and the adapter, which is a file named ADAPTER_FILE.

        Raises WeightsUnusable for a file that cannot be read, repeats a tensor, or is an adapter of other weights.
        """
        self._files = [file for file in files if file.name != ADAPTER_FILE]
        self._states = tuple(map(_state, self._files))
        shapes: dict[str, list[int]] = {}
        for file in self._files:
            with _opened(file) as shard:
                for name in shard.keys():  # noqa: SIM118 - a shard is not iterable
                    if name in shapes:
                        raise WeightsUnusable(f"{file}: {name} is in another shard too")
                    shapes[name] = shard.get_slice(name).get_shape()
        adapters = [file for file in files if file.name == ADAPTER_FILE]
        self.adapter: Adapter | None = read_adapter(adapters[0], shapes) if adapters else None
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
                for name in shard.keys():  # noqa: SIM118
                    if names is None or name in names:
                        tensor = shard.get_tensor(name)
                        yield name, tensor if self.adapter is None else self.adapter.merged_into(name, tensor, device)


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
            names = frozenset(shard.keys())
        save_file(dict(tensors.read(names)), to / file.name, {"format": "pt"})


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
