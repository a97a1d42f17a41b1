"""The safetensors files with the weights of a policy: one file, or shards that an index names.

The folder of an adapter has the adapter's file instead, and the weights are those of the first policy.
"""

from __future__ import annotations

import json
from pathlib import Path

from nouscoder.atomic_files import sha256_of
from nouscoder.domain.policy import Shard
from nouscoder.errors import NousCoderError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The names that PEFT uses.
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

# What changes when a file is replaced or written: its inode, its size, and the time of its last change [ns].
FileState = tuple[int, int, int]


class WeightsMissing(NousCoderError):
    """The folder has no readable weights. The message names the invalid file."""


class WeightsUnusable(NousCoderError):
    """Files of weights cannot be read, or do not fit together. The message names the file."""


def weights_files(folder: Path) -> tuple[Path, ...]:
    """The shards that the index names, sorted by name. Without an index, the single file.

    Raises WeightsMissing when the index cannot be read or names files outside the folder.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return (folder / WEIGHTS_FILE,)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsMissing(f"{index} is not an index of safetensors files: {error}") from error
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise WeightsMissing(f"{index} must name files of its own folder")
    return tuple(folder / name for name in names)


def is_adapter(folder: Path) -> bool:
    """Whether the folder of a policy holds an adapter of the first policy, not whole weights."""
    return (folder / ADAPTER_FILE).is_file()


def policy_files(folder: Path, first: Path) -> tuple[Path, ...]:
    """The files that give every tensor of the policy in `folder`: its own, or those of `first` and its adapter.

    Raises WeightsMissing.
    """
    return (*weights_files(first), folder / ADAPTER_FILE) if is_adapter(folder) else weights_files(folder)


def state_of(file: Path) -> FileState:
    """The state of a file, which tells whether it has changed. Raises OSError."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def shards_of(folder: Path) -> tuple[Shard, ...]:
    """The weights of a folder as shards of a manifest. Reads every byte. Raises WeightsMissing."""
    shards: list[Shard] = []
    for file in weights_files(folder):
        try:
            shards.append(Shard(file.name, sha256_of(file), file.stat().st_size))
        except OSError as error:
            raise WeightsMissing(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise WeightsMissing(f"{folder}: {error}") from error
    return tuple(shards)
