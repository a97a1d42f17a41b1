"""Deltas: what changed from one file of weights to the next, lossless and small.

A file is compared as a sequence of 16-bit words, so a bfloat16 value is one word. A step at a usual learning rate
changes few of them, and most of those by one unit in the last place. A delta has blocks of words. For each it holds, in
one zstd frame, the gaps between the changed words and what is added to each, modulo 2^16:

    header      8 bytes: _MAGIC
    block       3 x uint32: bytes of gaps, changed words, bytes of the frame
                the frame: gaps, then the low and then the high bytes of what is added
    gap         bytes of 255, then one below 255; their sum is the distance from the changed word before

INVARIANT: `apply_delta` and `change` make of the base of a delta exactly the bytes of the other file. A damaged delta
raises DeltaUnusable, or gives other bytes, whose checksum differs from that of the policy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import zstandard

from nouscoder.errors import ExitCode, NousCoderError

_MAGIC = b"NCDELTA1"
_BLOCK = struct.Struct("<III")
_BLOCK_WORDS = 2**22
_LONG_GAP = 255
_LEVEL = 3

Words = npt.NDArray[np.uint16]


class DeltaUnusable(NousCoderError):
    """A delta cannot be made or applied. The message names the file."""

    exit_code = ExitCode.DAMAGED


def write_delta(base: Path, file: Path, to: Path) -> None:
    """Write what changes `base` into `file`. Both have the same size, an even number of bytes. Raises DeltaUnusable."""
    num_bytes = file.stat().st_size
    if base.stat().st_size != num_bytes:
        raise DeltaUnusable(f"{file} has {num_bytes} bytes, and its base {base} has {base.stat().st_size}")
    with base.open("rb") as before, file.open("rb") as after, to.open("wb") as output:
        output.write(_MAGIC)
        for old, new in zip(_blocks(before), _blocks(after), strict=True):
            changed = np.flatnonzero(old != new)
            output.write(_block_of(changed, new[changed] - old[changed]))


def write_changes(places: npt.NDArray[np.int64], added: Words, num_bytes: int, to: Path) -> None:
    """As `write_delta`, of a file of `num_bytes` whose words at `places`, ascending, change by `added`."""
    if num_bytes % 2:
        raise DeltaUnusable(f"the file of {to} has an odd number of bytes")
    with to.open("wb") as output:
        output.write(_MAGIC)
        for start in range(0, num_bytes // 2, _BLOCK_WORDS):
            first, end = np.searchsorted(places, (start, start + _BLOCK_WORDS))
            output.write(_block_of(places[first:end] - start, added[first:end]))


def _block_of(changed: npt.NDArray[np.int64], added: Words) -> bytes:
    """A block, of the places in it and what is added to each."""
    gaps, parts = _gaps_of(changed), added.astype("<u2").view(np.uint8)
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(
        gaps.tobytes() + parts[0::2].tobytes() + parts[1::2].tobytes()
    )
    return _BLOCK.pack(len(gaps), len(changed), len(frame)) + frame


def apply_delta(base: Path, delta: Path, to: Path) -> None:
    """Write to `to` the file that `delta` was made of. Raises DeltaUnusable.

    Files are read and written with one call each: beside a busy event loop a thread waits after every call.
    """
    data = np.fromfile(base, np.uint8)
    change(data, delta.read_bytes(), f"{delta}")
    data.tofile(to)


def change(data: npt.NDArray[np.uint8], delta: bytes, name: str) -> None:
    """Change the bytes of a base, [size of the file], in place into those of the other file. Raises DeltaUnusable.

    `name` is that of the delta in messages. After an error the bytes are undefined.
    """
    if len(data) % 2:
        raise DeltaUnusable(f"the base of {name} has an odd number of bytes")
    words, changes = data.view("<u2"), BytesIO(delta)
    if changes.read(len(_MAGIC)) != _MAGIC:
        raise DeltaUnusable(f"{name} is not a delta of weights")
    for start in range(0, len(words), _BLOCK_WORDS):
        try:
            positions, added = _read_block(changes)
            words[start : start + _BLOCK_WORDS][positions] += added
        except (ValueError, IndexError, struct.error, zstandard.ZstdError) as error:
            raise DeltaUnusable(f"{name} is damaged, or belongs to another base: {error}") from error
    if changes.read(1):
        raise DeltaUnusable(f"{name} is longer than its base")


def _blocks(file: BinaryIO) -> Iterator[Words]:
    while data := file.read(2 * _BLOCK_WORDS):
        if len(data) % 2:
            raise DeltaUnusable(f"{file.name} has an odd number of bytes")
        yield np.frombuffer(bytearray(data), dtype="<u2")


def _gaps_of(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """The gaps as bytes, see the module."""
    long, rest = np.divmod(np.diff(positions, prepend=0), _LONG_GAP)
    ends = np.cumsum(long + 1) - 1
    gaps = np.full(int(ends[-1]) + 1 if len(ends) else 0, _LONG_GAP, dtype=np.uint8)
    gaps[ends] = rest
    return gaps


def _read_block(changes: BinaryIO) -> tuple[npt.NDArray[np.int64], Words]:
    """The positions of the changed words of the next block, [changed], and what is added to each."""
    num_gaps, num_changed, num_bytes = _BLOCK.unpack(changes.read(_BLOCK.size))
    if num_changed > _BLOCK_WORDS or num_gaps > 2 * _BLOCK_WORDS:
        raise ValueError("a block has more changes than words")
    size = num_gaps + 2 * num_changed
    frame = changes.read(num_bytes)
    if zstandard.frame_content_size(frame) != size:
        raise ValueError(f"a block does not have {size} bytes")
    data = zstandard.ZstdDecompressor().decompress(frame)
    gaps = np.frombuffer(data, np.uint8, num_gaps)
    positions = np.cumsum(gaps, dtype=np.int64)[gaps != _LONG_GAP]
    if len(positions) != num_changed:
        raise ValueError(f"a block has {len(positions)} gaps and not {num_changed}")
    added = np.empty(2 * num_changed, np.uint8)
    added[0::2] = np.frombuffer(data, np.uint8, num_changed, num_gaps)
    added[1::2] = np.frombuffer(data, np.uint8, num_changed, num_gaps + num_changed)
    return positions, added.view(np.uint16)
