"""Relative paths of a configuration: they start at the folder of the file that names them.

HUB_ID is the form of a model's name on a hub. Defaults are not changed: `problems.train`, `problems.held_out`,
`policy.path` and `broker.records.folder` start at the run folder then, where `nouscoder demo` and `nouscoder
prepare-run` make their inputs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nouscoder.config.base import Place
from nouscoder.config.keys import Key, keys_of

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def place_paths(tree: dict[str, Any], model: type[BaseModel], folder: Path) -> None:
    """Make the relative paths in `tree`, the unchecked values of `model`, absolute. They start at `folder`."""
    for key in keys_of(model):
        if key.place is None:
            continue
        node: Any = tree
        for part in key.path[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and key.path[-1] in node:
            node[key.path[-1]] = _placed(node[key.path[-1]], folder, key)


def _placed(value: Any, folder: Path, key: Key) -> Any:
    if isinstance(value, list):
        return [_placed(each, folder, key) for each in value]
    if not isinstance(value, str) or not value or "://" in value or Path(value).is_absolute():
        return value
    placed = (folder / value).resolve()
    return value if not placed.exists() and _may_be_elsewhere(value, key) else str(placed)


def _may_be_elsewhere(value: str, key: Key) -> bool:
    """Whether the value may name something that is not in the file's folder: in the run folder, or on a hub."""
    is_default = key.place in (Place.RUN_INPUT, Place.MODEL) and Path(value) == key.field.default
    return is_default or (key.place is Place.MODEL and HUB_ID.fullmatch(value) is not None)
