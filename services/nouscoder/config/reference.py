"""docs/configuration.md, made from the configuration's models: `python -m nouscoder.config.reference`."""

from __future__ import annotations

import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from nouscoder.config.base import Place
from nouscoder.config.keys import Key, keys_of
from nouscoder.config.tree import Config

_HEAD = """# Configuration

Every key of the file that `nouscoder train`, `nouscoder serve` and `--config` read. The file is TOML, or JSON when its
name ends in .json. `--set a.b=value` changes one key. Unknown keys are refused. `nouscoder init` writes a file to begin
with. This document is generated: `python -m nouscoder.config.reference > docs/configuration.md`.

A key marked *path* is relative to the folder of the file, or with `--set` to the working directory. The defaults of
`problems.train`, `problems.held_out` and `policy.path` are relative to the run folder when the folder of the file has
nothing of that name.
"""


def reference() -> str:
    """The document."""
    sections: dict[str, list[Key]] = {}
    for key in keys_of(Config):
        sections.setdefault(".".join(key.path[:-1]), []).append(key)
    lines = [_HEAD]
    for name, keys in sections.items():
        lines += [f"## {name}", "| key | type | default | meaning |", "|---|---|---|---|", *map(_row, keys), ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(key: Key) -> str:
    return f"| `{key.path[-1]}` | {_kind(key)} | {_default(key.field.default)} | {_meaning(key)} |"


def _meaning(key: Key) -> str:
    text = _escaped(key.field.description or "")
    bounds = [f"{sign} {value:.10g}" for sign, value in _bounds(key)]
    return f"{text} ({', '.join(bounds)})" if bounds else text


def _bounds(key: Key) -> list[tuple[str, float]]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return [
        (sign, getattr(mark, name))
        for mark in key.field.metadata
        for name, sign in signs.items()
        if hasattr(mark, name)
    ]


def _kind(key: Key) -> str:
    if key.place is Place.MODEL:
        return "path, or a model of a hub"
    return "path" if key.place is not None else _escaped(_type_name(key.field.annotation))


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(each) for each in arguments if each is not type(None))
    if origin is dict:
        return "table"
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(f"`{member.value}`" for member in kind)
    names = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    if value is None or value == "":
        return "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
