"""The writable memory of the interpreter that candidates get from a file (init/image.c).

The file has the size of all parts. Its pages are used by one test after the other, so the host allocates none.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_uint64

from . import kernel

_LEAST_BYTES = 64 * 1024  # smaller ones, such as the data of most libraries, cost less when the kernel copies them


class _Part(ctypes.Structure):
    """`struct iovec` of the C library."""

    _fields_ = [("address", c_uint64), ("num_bytes", c_uint64)]


class Image:
    """Made once in the zygote, which must not unmap any part later."""

    def __init__(self, fd: int, parts: ctypes.Array[_Part]) -> None:
        self.fd = fd
        self.parts = parts

    @staticmethod
    def open(not_at: int) -> Image:
        """Make the file. The mapping with the address `not_at` is no part. Raises OSError."""
        kernel.fix_heap_end()
        with open("/proc/self/maps", encoding="utf8", errors="surrogateescape") as maps:
            found = writable_parts(maps.read(), not_at)
        parts = (_Part * len(found))(*(_Part(*part) for part in found))
        fd = kernel.move_up(os.memfd_create("memory"))
        offset = 0
        for address, num_bytes in found:
            offset += kernel.write_memory(fd, address, num_bytes, offset)
        return Image(fd, parts)


def writable_parts(maps: str, not_at: int) -> list[tuple[int, int]]:
    """Address and length of the large private writable mappings in the text of /proc/self/maps, without the stack."""
    found: list[tuple[int, int]] = []
    for line in maps.splitlines():
        place, rights, *rest = line.split()
        start, end = (int(number, 16) for number in place.split("-"))
        if rights != "rw-p" or "[stack]" in rest or start <= not_at < end:
            continue
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], end - found[-1][0])
        else:
            found.append((start, end - start))
    return [(start, num_bytes) for start, num_bytes in found if num_bytes >= _LEAST_BYTES]
