"""The binary form of a piece of a rollout in progress (domain/partial.py). Pieces are written one after another.

offset  size  what
     0     4  magic "NCRP"
     4     2  version of this layout, 1
     6     1  1 if the first segment is the rest of the one before
     7     1  0
     8     8  size of the piece in bytes
    16     4  number of its first token in the rollout
    20     4  num_tokens, of all segments
    24     4  num_sampled, tokens of the sampled segments
    28     4  num_segments
    32     4  num_spans
    36     4  CRC-32 of the whole piece with these four bytes zero
    40     -  sections of tokens (record_sections.py)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from nouscoder.domain.partial import PartialRollout, joined
from nouscoder.store.record_sections import (
    RecordError,
    checksum,
    cut,
    expect_little_endian,
    padded,
    padded_size,
    segments_in,
    spans_in,
    token_sections,
    token_sizes,
)

_MAGIC = b"NCRP"
_VERSION = 1
_HEADER = struct.Struct("<4sHBxQ6I")
_CHECKSUM = slice(36, 40)


def encode_piece(piece: PartialRollout) -> bytes:
    """The piece as bytes."""
    expect_little_endian()
    sections = token_sections(piece)
    header = _HEADER.pack(
        _MAGIC, _VERSION, int(piece.continues), _HEADER.size + padded_size(sections), piece.first_token,
        len(piece.token_ids), len(piece.logprobs), len(piece.segments), len(piece.versions), 0,
    )  # fmt: skip
    data = bytearray().join([header, *padded(sections)])
    data[_CHECKSUM] = checksum(data, _CHECKSUM)
    return bytes(data)


def decode_pieces(data: bytes) -> PartialRollout:
    """The beginning of a rollout from all its pieces. Raises RecordError."""
    expect_little_endian()
    try:
        return joined(_pieces(memoryview(data)))
    except ValueError as error:
        raise RecordError(f"the pieces of a rollout contradict each other: {error}") from error


def _pieces(data: memoryview) -> Iterator[PartialRollout]:
    """Raises RecordError, and ValueError when a piece contradicts itself."""
    while data:
        if len(data) < _HEADER.size:
            raise RecordError(f"a piece of a rollout is cut off: {len(data)} bytes are less than its header")
        magic, version, continues, size, first_token, *numbers, crc = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise RecordError(f"these bytes are no piece of a rollout: they begin with {magic!r}, version {version}")
        piece, data = data[:size], data[size:]
        if len(piece) < size or crc.to_bytes(4, "little") != checksum(piece, _CHECKSUM):
            raise RecordError("a piece of a rollout is damaged: its size or its checksum does not match")
        num_tokens, num_sampled, num_segments, num_spans = numbers
        sizes = token_sizes(num_segments, num_spans, num_tokens, num_sampled)
        segments, spans, token_ids, logprobs = cut(piece, _HEADER.size, sizes)
        yield PartialRollout(
            first_token,
            bool(continues),
            segments_in(segments),
            token_ids.cast("i"),
            logprobs.cast("f"),
            spans_in(spans),
        )
