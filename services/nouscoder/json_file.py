"""Reads a JSON object from a file, with the error of the caller's own kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nouscoder.errors import why_unreadable


def read_json_object(file: Path, unreadable: Callable[[str], Exception]) -> dict[str, Any]:
    """The object in `file`. Raises `unreadable` with a sentence that names the file when there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise unreadable(f"{file} cannot be read: {why_unreadable(error)}") from error
    if not isinstance(value, dict):
        raise unreadable(f"{file} cannot be read: it holds no JSON object")
    return value
