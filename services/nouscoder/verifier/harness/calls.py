"""Call tests inside the candidate's process: reads the arguments, calls the entry point, writes the value as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

RESULT_FD = 3
UNENCODABLE = b"!"  # first byte of a result whose value has no JSON form; no JSON starts with it


def read_arguments() -> dict[str, Any]:
    """Read the arguments from descriptor 0, and leave an empty stdin for the program."""
    chunks = []
    while chunk := os.read(0, 1 << 20):
        chunks.append(chunk)
    os.ftruncate(0, 0)
    os.lseek(0, 0, os.SEEK_SET)
    arguments: dict[str, Any] = json.loads(b"".join(chunks))
    return {"args": arguments.get("args", []), "kwargs": arguments.get("kwargs", {})}


def call(namespace: dict[str, Any], entry_point: str, arguments: dict[str, Any]) -> None:
    """Call the entry point and write its return value. Raises whatever the candidate's code raises."""
    value = find_entry_point(namespace, entry_point)(*arguments["args"], **arguments["kwargs"])
    view = memoryview(encode_value(value))
    while view:
        view = view[os.write(RESULT_FD, view) :]


def find_entry_point(namespace: dict[str, Any], entry_point: str) -> Any:
    """Find "f", "Solution.f" or "Solution().f". A plain name is also searched in `class Solution`.

    Raises NameError or AttributeError, like the program itself, when it does not exist.
    """
    owner, _, name = entry_point.rpartition(".")
    owner = owner.removesuffix("()")
    if not owner and name not in namespace and hasattr(namespace.get("Solution"), name):
        owner = "Solution"
    if not owner:
        if name not in namespace:
            raise NameError(f"name {name!r} is not defined")
        return namespace[name]
    if owner not in namespace:
        raise NameError(f"name {owner!r} is not defined")
    return getattr(namespace[owner](), name)


def encode_value(value: Any) -> bytes:
    """The value as JSON, with tuples and arrays (`tolist`) as lists; else UNENCODABLE and the type's name."""
    try:
        return json.dumps(value, default=_plain).encode()
    except Exception:  # an untrusted value may raise anything; that is a wrong answer, not a runtime error
        return UNENCODABLE + type(value).__name__.encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"no JSON form: {type(value).__name__}")
