"""The safetensors files with the weights of a Hugging Face folder: one file, or shards that an index names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from nouscoder.domain.policy import Shard
from nouscoder.errors import NousCoderError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class WeightsMissing(NousCoderError):
    """The folder has no readable weights. The message names the invalid file."""


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


def shards_of(folder: Path) -> tuple[Shard, ...]:
    """The weights of a folder as shards of a manifest. Reads every byte. Raises WeightsMissing."""
    shards: list[Shard] = []
    for file in weights_files(folder):
        try:
            with file.open("rb") as data:
                sha256 = hashlib.file_digest(data, "sha256").hexdigest()
            shards.append(Shard(file.name, sha256, file.stat().st_size))
        except OSError as error:
            raise WeightsMissing(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise WeightsMissing(f"{folder}: {error}") from error
    return tuple(shards)
