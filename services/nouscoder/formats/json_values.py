"""JSON text as a value, and a case of tests as JSON, quickly. orjson does both in half of pydantic's time.

The value never depends on the library: what orjson refuses and Python's json module takes (NaN, infinity, deep nesting)
is read by pydantic, and so is a text with an integer beyond 64 bits, which orjson would round.
"""

from __future__ import annotations

import json
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from nouscoder.domain.submission import CallCase, Case, StdinCase

_PIECE_CHARS = 1 << 20
_FIRST_ROUNDED = 2.0**63  # no smaller integer is read as a float
_NEVER_ROUNDED = frozenset({str, int, bool, type(None)})


def json_value(text: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError, which says where the text is wrong."""
    try:
        value = orjson.loads(text)
        return from_json(text) if _may_be_rounded(value) else value
    except (ValueError, RecursionError):
        return from_json(text)


def json_bytes(value: Any) -> bytes:
    """A value as JSON text. Much quicker than Python's json module, which writes what pydantic refuses."""
    try:
        return to_json(value)
    except ValueError:  # texts that are not Unicode, deep nesting
        return json.dumps(value).encode()


def text_json(text: str) -> str:
    """A text as JSON, written piece by piece, because the interpreter runs nothing else meanwhile."""
    if len(text) <= _PIECE_CHARS:
        return json.dumps(text)
    pieces = (json.dumps(text[at : at + _PIECE_CHARS])[1:-1] for at in range(0, len(text), _PIECE_CHARS))
    return f'"{"".join(pieces)}"'


def case_json(case: Case) -> bytes:
    """A case of tests in the canonical form. Raises what `formats.tests.canonical_parts` raises."""
    record: object = case
    if isinstance(case, StdinCase):
        if not case.args:  # as in the digests of earlier versions
            record = {"input": case.input, "output": case.output}
    elif isinstance(case, CallCase):  # orjson writes NaN as null, and no integer beyond 64 bits
        return to_json(case)
    try:
        return orjson.dumps(record)
    except TypeError:
        return to_json(record)  # it raises ValueError for text that is not Unicode


def _may_be_rounded(value: Any) -> bool:
    """Whether a float is so large that it may have been an integer."""
    kind = type(value)
    if kind is float:
        return bool(abs(value) >= _FIRST_ROUNDED)
    if kind is not list and kind is not dict:
        return False
    values = value if kind is list else value.values()
    # Most lists and records hold only texts and integers. Looking at their types takes a fifth of a loop's time.
    return not _NEVER_ROUNDED.issuperset(map(type, values)) and any(map(_may_be_rounded, values))
