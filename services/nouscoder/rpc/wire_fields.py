"""Counts the fields of a message before it is parsed. Pure.

Parsing takes 0.6 µs and 60 bytes for each field, so 64 MiB of empty messages take 20 s and 2 GB, and the interpreter
runs nothing else meanwhile. Counting stops at a bound. Source of the format: protobuf.dev, Encoding.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def has_more_fields(data: bytes, message: Descriptor, most: int) -> bool:
    """Whether the bytes of a message have more than `most` fields, with those of the messages inside it.

    Counts up to where the bytes are no message, because parsing stops there too.
    """
    inside = {field.number: field.message_type for field in message.fields}
    pending = [(0, len(data), inside)]
    known = {message.full_name: inside}
    count = 0
    while pending:
        at, end, inside = pending.pop()
        while at < end:
            count += 1
            if count > most:
                return True
            tag, at = _varint(data, at, end)
            kind = tag & 7
            if kind == _BYTES:
                size, at = _varint(data, at, end)
                nested = inside.get(tag >> 3)
                if size and nested is not None and at + size <= end:
                    if nested.full_name not in known:
                        known[nested.full_name] = {field.number: field.message_type for field in nested.fields}
                    pending.append((at + size, end, inside))
                    end, inside = at + size, known[nested.full_name]
                else:
                    at += size
            elif kind == _VARINT:
                _, at = _varint(data, at, end)
            else:
                at += _FIXED_BYTES.get(kind, 0)
    return False


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at a place, and the place after it; the end for one that is cut off."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, max(end, at)
