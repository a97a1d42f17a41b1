"""Call tests, inside the candidate's process: arguments in, the entry point called, its value out as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

RESULT_FD = 3
UNENCODABLE = b"!"  # a result that starts so is not JSON: the value has no JSON form


def read_arguments() -> dict[str, Any]:
    """The arguments come on descriptor 0, and the program finds an empty stdin there."""
    chunks = []
    while chunk := os.read(0, 1 << 20):
        chunks.append(chunk)
    os.ftruncate(0, 0)
    os.lseek(0, 0, os.SEEK_SET)
    arguments: dict[str, Any] = json.loads(b"".join(chunks))
    return {"args": arguments.get("args", []), "kwargs": arguments.get("kwargs", {})}


def call(namespace: dict[str, Any], entry_point: str, arguments: dict[str, Any]) -> None:
    """Call the entry point and write what it returns. Raises whatever the candidate's code raises."""
    value = find_entry_point(namespace, entry_point)(*arguments["args"], **arguments["kwargs"])
    view = memoryview(encode_value(value))
    while view:
        view = view[os.write(RESULT_FD, view) :]


def find_entry_point(namespace: dict[str, Any], entry_point: str) -> Any:
    """Find "f", "Solution.f" and "Solution().f"; a bare name is also looked for in `class Solution`.

    Raises NameError or AttributeError, as the program itself would, when there is no such thing.
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
    """JSON; tuples become lists, arrays (anything with `tolist`) their lists. Else UNENCODABLE and the type's name."""
    try:
        return json.dumps(value, default=_plain).encode()
    except Exception:  # a hostile value may raise anything; no value is a wrong answer, not a crash
        return UNENCODABLE + type(value).__name__.encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"no JSON form: {type(value).__name__}")
