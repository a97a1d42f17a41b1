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
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import dropwhile
from typing import TYPE_CHECKING

import zstandard

from nouscoder.domain.reasoning import has_thinking
from nouscoder.domain.rollout import Rollout, RolloutHeader, Sampling
from nouscoder.domain.tokens import ExpertChoices, FinishReason, Segment
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
