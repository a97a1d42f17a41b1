"""How much a JSON text becomes when it is decoded, counted without decoding it. Pure.

The *weight* of a text counts what takes time and memory: 1 for each comma, list and text, 2 for each object and 8 for
each of its fields. `[1,2,3]` weighs 4. For each unit of weight, decoding and encoding take at most 200 ns each, and the
values at most 48 bytes, beside the characters of texts (measured: lists of numbers, texts, lists and objects, and one
large object). Characters inside texts weigh nothing, so a test with megabytes of input is light. Equal values have the
same weight, also where one has 1.0 and the other 1.
"""

from __future__ import annotations

import sys

MAX_WEIGHT = 500_000  # decoding as much in one call holds the interpreter for a tenth of a second
BYTES_PER_WEIGHT = 48
_WEIGHTS = ((b",", 1), (b"[", 1), (b"{", 2), (b":", 8))
_PIECE_BYTES = 1 << 18  # the interpreter runs nothing else while it looks at a piece


class TooManyValues(Exception):
    """A text weighs more than it may."""

    def __init__(self) -> None:
        super().__init__(f"holds too many values: at most about {MAX_WEIGHT:,} integers, or fewer of other kinds")


class ValueCount:
    """The weight of all JSON texts of one request: its body, and texts inside it that are JSON themselves."""

    def __init__(self, weight: int = 0, most: int = MAX_WEIGHT) -> None:
        self.weight = weight
        self._most = most

    @classmethod
    def unbounded(cls) -> ValueCount:
        """Of a text of this machine's own user."""
        return cls(most=sys.maxsize)

    def add(self, text: bytes | str) -> None:
        """Count a text that is about to be decoded. Raises TooManyValues."""
        self.add_weight(json_weight(text, self._most - self.weight))

    def add_weight(self, weight: int) -> None:
        """Count values. Raises TooManyValues."""
        self.weight += weight
        if self.weight > self._most:
            raise TooManyValues


def json_weight(text: bytes | str, enough: int = sys.maxsize) -> int:
    """The weight of a text; of one that weighs more than `enough`, some weight above it.

    Where the text stops being JSON, the weight of the rest may be wrong; no decoder reads it.
    """
    data = text if isinstance(text, bytes) else text.encode("utf8", "surrogatepass")
    weight, inside, rest = 0, False, b""
    for begin in range(0, len(data), _PIECE_BYTES):
        piece = rest + data[begin : begin + _PIECE_BYTES]
        rest = b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what it escapes is in the next piece
                piece, rest = piece[:-1], b"\\"
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[inside::2])
        weight += sum(each * outside.count(mark) for mark, each in _WEIGHTS)
        weight += (len(parts) - 1 + (not inside)) // 2  # the texts that begin in this piece
        inside ^= len(parts) % 2 == 0
        if weight > enough:
            break
    return weight
