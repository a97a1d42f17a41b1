"""A Hugging Face folder from the configuration and tokenizer of one folder and the weights of another.

The learner publishes only weights; everything else of a policy is in the folder that the run began with.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import whole_folder
from nouscoder.errors import NousCoderError
from nouscoder.policy_folder.weights_files import INDEX_FILE, WEIGHTS_FILE, weights_files

CONFIG_FILE = "config.json"
_SUFFIXES = {".json", ".txt", ".model", ".jinja"}


class PolicyFilesMissing(NousCoderError):
    """A file of the policy is missing or cannot be read. The message names it."""


def compose_policy(
    to: Path, first: Path, weights: Path, *, config: dict[str, Any] | None = None, card: str = "", link: bool = False
) -> None:
    """Write the folder `to`: everything but weights is that of `first`, and the weights are those in `weights`.

    `config` replaces config.json, and `card` becomes README.md. With `link` weights are hard links where the file
    system has them. `to` appears complete or not at all. Raises PolicyFilesMissing, WeightsMissing and StorageError.
    """
    files = [*weights_files(weights)]
    if (weights / INDEX_FILE).is_file():
        files.append(weights / INDEX_FILE)
    missing = [file for file in (first / CONFIG_FILE, *files) if not file.is_file()]
    if missing:
        raise PolicyFilesMissing(f"{missing[0]} does not exist: the policy is not complete")
    with whole_folder(to) as part:
        for file in sorted(first.iterdir()):
            if file.suffix in _SUFFIXES and file.name != INDEX_FILE and file.is_file():
                shutil.copyfile(file, part / file.name)
        for file in files:
            _put(file, part / file.name, link=link)
        if config is not None:
            (part / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
        if card:
            (part / "README.md").write_text(card, encoding="utf8")


def link_weights(to: Path, weights: Path) -> None:
    """Make the folder `to` hold the weights in `weights`, as hard links where possible. Raises as `compose_policy`."""
    files = [*weights_files(weights), *weights.glob(INDEX_FILE)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise PolicyFilesMissing(f"{missing[0]} does not exist: the policy is not complete")
    with whole_folder(to) as part:
        for file in files:
            _put(file, part / file.name, link=True)


def with_yarn(folder: Path, factor: float, original_tokens: int) -> dict[str, Any]:
    """config.json of `folder` with YaRN rope scaling (arXiv 2309.00071) from `original_tokens` positions.

    transformers 5 keeps it in rope_parameters, older configurations in rope_scaling. Raises PolicyFilesMissing.
    """
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise PolicyFilesMissing(f"{folder / CONFIG_FILE} cannot be read: {error}") from error
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_tokens}
    if isinstance(config.get("rope_parameters"), dict):
        config["rope_parameters"] = {**config["rope_parameters"], **yarn}
    else:
        config["rope_scaling"] = yarn
    config["max_position_embeddings"] = round(factor * original_tokens)
    return config


def has_weights(folder: Path) -> bool:
    """Whether the folder holds a safetensors file or an index of them."""
    return (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file()


def _put(file: Path, place: Path, *, link: bool) -> None:
    if link:
        try:
            os.link(file.resolve(), place)
        except OSError:  # another file system, or one without hard links
            pass
        else:
            return
    shutil.copyfile(file, place)
