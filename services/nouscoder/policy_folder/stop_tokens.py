"""The stop tokens of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILES = ("generation_config.json", "config.json")


class StopTokensError(ValueError):
    """A configuration file has invalid token ids. The message names the file."""


def stop_token_ids(folder: Path) -> frozenset[int]:
    """Every `eos_token_id` of generation_config.json and config.json; empty when neither has one.

    A chat model has several: for example, one for the end of a turn and one for the end of a document. Raises
    StopTokensError.
    """
    found: set[int] = set()
    for file in (folder / name for name in _FILES):
        if file.is_file():
            found |= _eos_ids(file)
    return frozenset(found)


def _eos_ids(file: Path) -> set[int]:
    try:
        config: Any = json.loads(file.read_text(encoding="utf8"))
        value = config.get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise StopTokensError(f"{file} is not a configuration: {error}") from error
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in values):
        raise StopTokensError(f"{file}: eos_token_id must be a token id or a list of token ids")
    return set(values)
