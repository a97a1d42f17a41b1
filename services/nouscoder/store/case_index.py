"""The index at the end of a file of tests (case_files.py): where its frames and cases are.

It is a skippable zstd frame, little-endian:

    uint32 num_frames, num_cases; then per frame uint64 end in the file, uint64 end in the text;
    then per case uint64 end in the text, uint32 size of its input; then uint32 CRC-32 of the index up to here;
    then uint32 size of the index up to here; then b"NCT1", the last four bytes of the file
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

_MAGIC = b"NCT1"
_SKIPPABLE = 0x184D2A50


class CaseIndex:
    """Where the frames and cases are."""

    def __init__(self) -> None:
        self.frame_ends: list[tuple[int, int]] = []  # in the file, in the text
        self.cases: list[tuple[int, int]] = []  # end in the text, size of the input

    def pack(self) -> bytes:
        """The skippable frame that ends the file."""
        body = struct.pack("<II", len(self.frame_ends), len(self.cases))
        body += b"".join(struct.pack("<QQ", *ends) for ends in self.frame_ends)
        body += b"".join(struct.pack("<QI", end, min(size, 2**32 - 1)) for end, size in self.cases)
        body += struct.pack("<I", zlib.crc32(body))
        payload = body + struct.pack("<I", len(body)) + _MAGIC
        return struct.pack("<II", _SKIPPABLE, len(payload)) + payload

    @classmethod
    def read(cls, read_at: Callable[[int, int], bytes], num_bytes: int) -> CaseIndex:
        """The index of a file of `num_bytes`. `read_at` returns a number of bytes from a place in the file.

        Raises ValueError when the index is missing or damaged.
        """
        tail = read_at(8, max(0, num_bytes - 8))
        if tail[4:] != _MAGIC:
            raise ValueError("it has no index")
        (size,) = struct.unpack("<I", tail[:4])
        body = read_at(size, max(0, num_bytes - 8 - size))
        if len(body) != size or size < 12 or struct.unpack("<I", body[-4:])[0] != zlib.crc32(body[:-4]):
            raise ValueError("its index is broken")
        num_frames, num_cases = struct.unpack_from("<II", body)
        index = cls()
        index.frame_ends = list(struct.iter_unpack("<QQ", body[8 : 8 + 16 * num_frames]))
        index.cases = list(struct.iter_unpack("<QI", body[8 + 16 * num_frames : -4]))
        if len(index.cases) != num_cases or num_frames < 1:
            raise ValueError("its index is broken")
        return index
