"""JSON of a record with long texts, in pieces, so that the whole of it is never in memory.

A NUL character of a program's output has six bytes in JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping

_PIECE_CHARS = 16 * 1024
BYTES_PER_CHAR = 6  # at most: of a control character, as \\u0000
MAX_PIECE_BYTES = 2 * BYTES_PER_CHAR * _PIECE_CHARS


async def json_pieces(record: Mapping[str, object]) -> AsyncIterator[bytes]:
    """The JSON of `record` as parts of at most MAX_PIECE_BYTES. Its values are texts, numbers, None and records."""
    waiting = ""
    for text in _texts(record):
        waiting += text
        if len(waiting) >= _PIECE_CHARS:
            yield waiting.encode()
            waiting = ""
    yield waiting.encode()


def _texts(value: object) -> Iterator[str]:
    """The JSON of `value`, each part of at most BYTES_PER_CHAR * _PIECE_CHARS bytes."""
    if isinstance(value, str):
        yield '"'
        for start in range(0, len(value), _PIECE_CHARS):
            yield json.dumps(value[start : start + _PIECE_CHARS], ensure_ascii=False)[1:-1]
        yield '"'
    elif isinstance(value, Mapping):
        yield "{"
        for number, (key, part) in enumerate(value.items()):
            yield f"{',' if number else ''}{json.dumps(key, ensure_ascii=False)}:"
            yield from _texts(part)
        yield "}"
    else:
        yield json.dumps(value)
