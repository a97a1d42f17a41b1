"""The binary record of a rollout: generation writes it once, the broker keeps it, verifier and learner read it.

All numbers are little-endian. Each section starts at a multiple of 8 bytes, so numpy.frombuffer reads it in
place. A record has version 1, or version 2 when it holds the experts that a mixture-of-experts policy chose.

    offset  size  what
         0     4  magic "NCRR"
         4     2  version of this layout, 1 or 2
         6     1  finish reason: 1 stop, 2 length
         7     1  version 2: bytes of an expert id, 1 or 2; version 1: 0
         8     8  size of the record in bytes
        16     4  num_tokens, of all segments
        20     4  num_sampled, tokens of the sampled segments
        24     4  num_segments
        28     4  num_spans
        32     4  size of the ids in bytes
        36     4  size of the text section in bytes
        40     8  sampling: temperature, float64
        48     8  sampling: top_p, float64
        56     8  sampling: seed
        64     4  sampling: max_new_tokens
        68     4  CRC-32 of the whole record with these four bytes zero
        72     -  segments      uint32 [num_segments, 2]: num_tokens; 1 sampled, 0 given
         -     -  spans         uint64 [num_spans, 2]: policy version; num_tokens
         -     -  token ids     int32 [num_tokens]
         -     -  logprobs      float32 [num_sampled]
         -     -  ids           UTF-8 JSON: [rollout_id, group_id, problem_id], then its own reward if it has one
         -     -  experts       version 2 only: uint32 num_layers, uint32 top_k, then the ids of experts, unsigned, as
                           [positions, num_layers, top_k]; positions: the tokens before the last sampled one
         -     -  text section

The text section can be read alone:

         0     1  encoding: 0 UTF-8, 1 UTF-8 compressed by zstd
         1     3  0
         4     4  CRC-32 of the text section with these four bytes zero
         8     8  size of the UTF-8 text in bytes
        16     -  the text, encoded

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

import json
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, dropwhile
from typing import TYPE_CHECKING

import zstandard

from nouscoder.domain.partial import PartialRollout, joined
from nouscoder.domain.reasoning import has_thinking
from nouscoder.domain.rollout import Rollout, RolloutHeader, Sampling
from nouscoder.domain.tokens import ExpertChoices, FinishReason, Segment, VersionSpan
from nouscoder.errors import ExitCode, NousCoderError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


# What records and pieces have in common.

# The format of an array of expert ids, by the bytes of an id.
EXPERT_FORMATS = {1: "B", 2: "H"}


class RecordError(NousCoderError):
    """These bytes are not a whole record, or have a version of the layout that is unknown here."""

    exit_code = ExitCode.DAMAGED


def token_sections(tokens: Rollout | PartialRollout) -> list[Buffer]:
    """The four sections above."""
    segments = list(chain.from_iterable((s.num_tokens, int(s.is_sampled)) for s in tokens.segments))
    spans = list(chain.from_iterable((s.policy_version, s.num_tokens) for s in tokens.versions))
    return [
        struct.pack(f"<{len(segments)}I", *segments),
        struct.pack(f"<{len(spans)}Q", *spans),
        tokens.token_ids,
        tokens.logprobs,
    ]


def token_sizes(num_segments: int, num_spans: int, num_tokens: int, num_sampled: int) -> tuple[int, ...]:
    """The sizes of the four sections in bytes."""
    return (8 * num_segments, 16 * num_spans, 4 * num_tokens, 4 * num_sampled)


def segments_in(section: memoryview) -> tuple[Segment, ...]:
    """The segments in their section."""
    return tuple(Segment(size, bool(kind)) for size, kind in struct.iter_unpack("<2I", section))


def spans_in(section: memoryview) -> tuple[VersionSpan, ...]:
    """The spans in their section."""
    return tuple(VersionSpan(*span) for span in struct.iter_unpack("<2Q", section))


def padded(sections: Sequence[Buffer]) -> Iterator[Buffer]:
    """The sections, each followed by zeros up to a multiple of 8 bytes."""
    for section in sections:
        yield section
        yield bytes(-memoryview(section).nbytes % 8)


def padded_size(sections: Sequence[Buffer]) -> int:
    """The size of the sections in bytes, with the zeros between them."""
    return sum(memoryview(part).nbytes for part in padded(sections))


def cut(view: memoryview, offset: int, sizes: Sequence[int]) -> list[memoryview]:
    """The sections of these sizes after a header of `offset` bytes. Raises RecordError unless they fill `view`."""
    sections = []
    for size in sizes:
        sections.append(view[offset : offset + size])
        offset += size + -size % 8
    if offset != len(view):
        raise RecordError(f"a rollout record's sections end at {offset}, not at its end, {len(view)}")
    return sections


def checksum(data: bytes | bytearray | memoryview, hole: slice) -> bytes:
    """CRC-32 of `data` with the four bytes of `hole` zero."""
    view = memoryview(data)
    crc = zlib.crc32(view[hole.stop :], zlib.crc32(bytes(4), zlib.crc32(view[: hole.start])))
    return crc.to_bytes(4, "little")


def expect_little_endian() -> None:
    """Raises RecordError on a machine that cannot read the arrays in place."""
    if sys.byteorder != "little":
        raise RecordError("rollout records are read in place, which needs a little-endian machine")


# Records.

MAGIC = b"NCRR"
VERSION, VERSION_WITH_EXPERTS = 1, 2
_HEADER = struct.Struct("<4sHBBQ6I2dQII")
_TEXT_HEADER = struct.Struct("<B3xIQ")
_EXPERTS_HEADER = struct.Struct("<2I")
_CHECKSUM = slice(68, 72)
_TEXT_CHECKSUM = slice(4, 8)
_FINISH = {FinishReason.STOP: 1, FinishReason.LENGTH: 2}
_FINISH_OF = {number: reason for reason, number in _FINISH.items()}
_PLAIN, _ZSTD = 0, 1
_ZSTD_LEVEL = 3
_MAX_TEXT_BYTES = 256 * 1024**2
# The text is compressed only if that makes it smaller than this share of its size.
_WORTH = 0.9


def encode_rollout(rollout: Rollout) -> tuple[RolloutHeader, bytes]:
    """The header that the broker keeps for a rollout, and the record."""
    expect_little_endian()
    own_reward = [] if rollout.own_reward is None else [rollout.own_reward]
    ids = json.dumps([rollout.rollout_id, rollout.group_id, rollout.problem_id, *own_reward]).encode()
    plain = rollout.text.encode("utf8", "surrogatepass")
    compressed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(plain)
    pays = len(compressed) < _WORTH * len(plain)
    section = bytearray(_TEXT_HEADER.pack(_ZSTD if pays else _PLAIN, 0, len(plain)))
    section += compressed if pays else plain
    section[_TEXT_CHECKSUM] = checksum(section, _TEXT_CHECKSUM)
    text = bytes(section)
    sections = [*token_sections(rollout), ids, *_encode_experts(rollout.experts), text]
    size = _HEADER.size + padded_size(sections)
    sampling = rollout.sampling
    version = VERSION if rollout.experts is None else VERSION_WITH_EXPERTS
    expert_id_bytes = 0 if rollout.experts is None else rollout.experts.ids.itemsize
    header = _HEADER.pack(
        MAGIC, version, _FINISH[rollout.finish_reason], expert_id_bytes, size,
        len(rollout.token_ids), len(rollout.logprobs), len(rollout.segments), len(rollout.versions),
        len(ids), len(text),
        sampling.temperature, sampling.top_p, sampling.seed, sampling.max_new_tokens, 0,
    )  # fmt: skip
    record = bytearray().join([header, *padded(sections)])
    record[_CHECKSUM] = checksum(record, _CHECKSUM)
    return _header_of(rollout, len(record), len(text)), bytes(record)


def decode_rollout(record: bytes | memoryview) -> Rollout:
    """The rollout; its arrays are views of `record`. Raises RecordError."""
    expect_little_endian()
    view = memoryview(record).cast("B") if not isinstance(record, memoryview) else record
    fields = _checked_header(view)
    finish, id_bytes, _, num_tokens, num_sampled, num_segments, num_spans, ids_bytes, text_bytes, *sampling = fields
    temperature, top_p, seed, max_new_tokens, _ = sampling
    sizes = [*token_sizes(num_segments, num_spans, num_tokens, num_sampled), ids_bytes, text_bytes]
    if id_bytes:  # the section of experts has the bytes that the others leave
        sizes.insert(-1, len(view) - _HEADER.size - sum(size + -size % 8 for size in sizes))
    segments, spans, token_ids, logprobs, ids, *experts, text = cut(view, _HEADER.size, sizes)
    try:
        rollout_id, group_id, problem_id, *own_reward = json.loads(bytes(ids))
        parts = segments_in(segments)
        return Rollout(
            rollout_id=rollout_id,
            group_id=group_id,
            problem_id=problem_id,
            segments=parts,
            token_ids=token_ids.cast("i"),
            logprobs=logprobs.cast("f"),
            versions=spans_in(spans),
            finish_reason=_FINISH_OF[finish],
            sampling=Sampling(temperature, top_p, max_new_tokens, seed),
            text=decode_text(text),
            experts=_decode_experts(experts[0], id_bytes, parts) if experts else None,
            own_reward=own_reward[0] if own_reward else None,
        )
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise RecordError(f"a rollout record contradicts itself: {error}") from error


def size_of_record(view: memoryview) -> int:
    """The bytes of the record that begins here, as its header says. Raises RecordError."""
    if len(view) < _HEADER.size:
        raise RecordError(f"a rollout record is cut off: {len(view)} bytes are less than its header")
    num_bytes: int = _HEADER.unpack_from(view)[4]
    return num_bytes


def _encode_experts(experts: ExpertChoices | None) -> list[Buffer]:
    """The section of a policy with experts; none for others."""
    if experts is None:
        return []
    return [_EXPERTS_HEADER.pack(experts.num_layers, experts.top_k) + experts.ids.cast("B")]


def _decode_experts(section: memoryview, id_bytes: int, segments: Sequence[Segment]) -> ExpertChoices:
    """Raises ValueError, KeyError or struct.error when the section is not that of these segments."""
    num_layers, top_k = _EXPERTS_HEADER.unpack_from(section)
    to_last_sampled = list(dropwhile(lambda segment: not segment.is_sampled, reversed(segments)))
    num_positions = sum(segment.num_tokens for segment in to_last_sampled) - 1
    end = _EXPERTS_HEADER.size + id_bytes * num_positions * num_layers * top_k
    if end + -end % 8 != len(section):
        raise ValueError(f"{len(section)} bytes of experts are not those of {num_positions} tokens")
    ids = section[_EXPERTS_HEADER.size : end].cast(EXPERT_FORMATS[id_bytes])  # type: ignore[call-overload]
    return ExpertChoices(ids, num_layers, top_k)


def decode_text(section: bytes | memoryview) -> str:
    """The text of a rollout from its text section alone. Raises RecordError."""
    if len(section) < _TEXT_HEADER.size:
        raise RecordError(f"a rollout's text section is cut off: {len(section)} bytes")
    encoding, crc, num_bytes = _TEXT_HEADER.unpack_from(section)
    if crc.to_bytes(4, "little") != checksum(section, _TEXT_CHECKSUM):
        raise RecordError("a rollout's text section is damaged: its checksum does not match")
    if encoding not in (_PLAIN, _ZSTD) or num_bytes > _MAX_TEXT_BYTES:
        raise RecordError(f"a rollout's text section has encoding {encoding} and {num_bytes} bytes of text")
    data = bytes(section[_TEXT_HEADER.size :])
    try:
        if encoding == _ZSTD:
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=num_bytes)
        if len(data) != num_bytes:
            raise RecordError(f"a rollout's text has {len(data)} bytes, not {num_bytes}")
        return data.decode("utf8", "surrogatepass")
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise RecordError(f"a rollout's text cannot be read: {error}") from error


def _header_of(rollout: Rollout, record_bytes: int, text_bytes: int) -> RolloutHeader:
    return RolloutHeader(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        problem_id=rollout.problem_id,
        num_tokens=len(rollout.token_ids),
        num_prompt_tokens=rollout.segments[0].num_tokens,
        oldest_version=rollout.oldest_version,
        newest_version=rollout.newest_version,
        finish_reason=rollout.finish_reason,
        record_bytes=record_bytes,
        text_offset=record_bytes - text_bytes - (-text_bytes % 8),
        text_bytes=text_bytes,
        num_turns=sum(segment.is_sampled for segment in rollout.segments),
        has_thinking=has_thinking(rollout.text),
        own_reward=rollout.own_reward,
    )


def _checked_header(view: memoryview) -> tuple[int, ...]:
    """The header's fields from the finish reason on. Raises RecordError."""
    if len(view) < _HEADER.size:
        raise RecordError(f"a rollout record is cut off: {len(view)} bytes are less than its header")
    magic, version, *fields = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise RecordError(f"these bytes are no rollout record: they begin with {magic!r}, not {MAGIC!r}")
    if version not in (VERSION, VERSION_WITH_EXPERTS):
        known = f"{VERSION} and {VERSION_WITH_EXPERTS}"
        raise RecordError(f"a rollout record has layout version {version}; this program reads versions {known}")
    if fields[1] not in ((0,) if version == VERSION else EXPERT_FORMATS):
        raise RecordError(f"a rollout record of layout version {version} has expert ids of {fields[1]} bytes")
    if fields[2] != len(view):
        raise RecordError(f"a rollout record has {len(view)} bytes, not {fields[2]} as its header says")
    if fields[-1].to_bytes(4, "little") != checksum(view, _CHECKSUM):
        raise RecordError("a rollout record is damaged: its checksum does not match")
    return tuple(fields)


# Pieces of rollouts in progress.

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
