"""What the binary records of rollouts, and of pieces of rollouts in progress, have in common."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from nouscoder.domain.partial import PartialRollout
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.tokens import Segment, VersionSpan
from nouscoder.errors import ExitCode, NousCoderError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

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
