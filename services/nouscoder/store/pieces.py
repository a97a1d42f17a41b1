"""Pieces of rollouts in progress, as bytes.

A piece of a rollout in progress (domain/partial.py) begins with another header. Pieces are written one after another:

         0     4  magic "NCRP"
         4     2  version of this layout: 1, or 2 with the experts that a mixture-of-experts policy chose
         6     1  1 if the first segment is the rest of the one before
         7     1  version 2: bytes of an expert id, 1 or 2; version 1: 0
         8     8  size of the piece in bytes
        16     4  number of its first token in the rollout
        20     4  num_tokens, of all segments
        24     4  num_sampled, tokens of the sampled segments
        28     4  num_segments
        32     4  num_spans
        36     4  CRC-32 of the whole piece with these four bytes zero
        40     -  segments, spans, token ids and logprobs as above
         -     -  version 2 only: uint32 positions, num_layers, top_k, 0, then the ids of experts
                  [positions, num_layers, top_k]; positions: the tokens before the last sampled one that no piece
                  before has
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nouscoder.domain.partial import PartialRollout, joined
from nouscoder.domain.tokens import ExpertChoices
from nouscoder.store.record_layout import (
    EXPERT_FORMATS,
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

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_PIECE_MAGIC = b"NCRP"
_PIECE_VERSION, _PIECE_VERSION_WITH_EXPERTS = 1, 2
_PIECE_HEADER = struct.Struct("<4sHBBQ6I")
_PIECE_EXPERTS_HEADER = struct.Struct("<4I")
_PIECE_CHECKSUM = slice(36, 40)


def encode_piece(piece: PartialRollout) -> bytes:
    """The piece as bytes."""
    expect_little_endian()
    experts = piece.experts
    sections = [*token_sections(piece), *_encode_piece_experts(experts)]
    version, id_bytes = (_PIECE_VERSION, 0) if experts is None else (_PIECE_VERSION_WITH_EXPERTS, experts.ids.itemsize)
    header = _PIECE_HEADER.pack(
        _PIECE_MAGIC, version, int(piece.continues), id_bytes, _PIECE_HEADER.size + padded_size(sections),
        piece.first_token,
        len(piece.token_ids), len(piece.logprobs), len(piece.segments), len(piece.versions), 0,
    )  # fmt: skip
    data = bytearray().join([header, *padded(sections)])
    data[_PIECE_CHECKSUM] = checksum(data, _PIECE_CHECKSUM)
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
        if len(data) < _PIECE_HEADER.size:
            raise RecordError(f"a piece of a rollout is cut off: {len(data)} bytes are less than its header")
        magic, version, continues, id_bytes, size, first_token, *numbers, crc = _PIECE_HEADER.unpack_from(data)
        if magic != _PIECE_MAGIC or version not in (_PIECE_VERSION, _PIECE_VERSION_WITH_EXPERTS):
            raise RecordError(f"these bytes are no piece of a rollout: they begin with {magic!r}, version {version}")
        piece, data = data[:size], data[size:]
        if len(piece) < size or crc.to_bytes(4, "little") != checksum(piece, _PIECE_CHECKSUM):
            raise RecordError("a piece of a rollout is damaged: its size or its checksum does not match")
        num_tokens, num_sampled, num_segments, num_spans = numbers
        sizes = [*token_sizes(num_segments, num_spans, num_tokens, num_sampled)]
        if version == _PIECE_VERSION_WITH_EXPERTS:  # the section of experts has the bytes that the others leave
            sizes.append(len(piece) - _PIECE_HEADER.size - sum(size + -size % 8 for size in sizes))
        segments, spans, token_ids, logprobs, *experts = cut(piece, _PIECE_HEADER.size, sizes)
        yield PartialRollout(
            first_token,
            bool(continues),
            segments_in(segments),
            token_ids.cast("i"),
            logprobs.cast("f"),
            spans_in(spans),
            _decode_piece_experts(experts[0], id_bytes) if experts else None,
        )


def _encode_piece_experts(experts: ExpertChoices | None) -> list[Buffer]:
    """The section of a policy with experts; none for others."""
    if experts is None:
        return []
    header = _PIECE_EXPERTS_HEADER.pack(experts.num_positions, experts.num_layers, experts.top_k, 0)
    return [header + experts.ids.cast("B")]


def _decode_piece_experts(section: memoryview, id_bytes: int) -> ExpertChoices:
    """Raises ValueError when the section contradicts itself."""
    if len(section) < _PIECE_EXPERTS_HEADER.size or id_bytes not in EXPERT_FORMATS:
        raise ValueError(f"{len(section)} bytes with ids of {id_bytes} bytes are no experts")
    num_positions, num_layers, top_k, _ = _PIECE_EXPERTS_HEADER.unpack_from(section)
    end = _PIECE_EXPERTS_HEADER.size + id_bytes * num_positions * num_layers * top_k
    if end + -end % 8 != len(section):
        raise ValueError(f"{len(section)} bytes of experts are not those of {num_positions} tokens")
    ids = section[_PIECE_EXPERTS_HEADER.size : end].cast(EXPERT_FORMATS[id_bytes])  # type: ignore[call-overload]
    return ExpertChoices(ids, num_layers, top_k)
