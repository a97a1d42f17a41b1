"""The Python side of init, process 1 of every submission's namespaces, which is written in C (init/).

The structures here mirror those of init/init.h.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from ctypes import c_char_p, c_int, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

from . import kernel
from .frames import SlotSettings
from .isolation import Isolation

REPORT, GO = 4, 5
_ASSIGNMENT = struct.Struct("@d5I")
_LEAST_BYTES = 64 * 1024  # smaller ones, such as the data of most libraries, cost less when the kernel copies them


class _Settings(ctypes.Structure):
    _fields_ = [
        ("stream_in", c_int),
        ("stream_out", c_int),
        ("peer", c_int),
        ("two_users", c_int),
        ("gvisor", c_int),
        ("last_pid", c_int),
        ("tmp_bytes", c_uint64),
        ("tmp_inodes", c_uint64),
        ("base_vm_bytes", c_uint64),
        ("filter", c_void_p),
        ("notifying_filter", c_void_p),
        ("image", c_int),
        ("num_parts", c_uint32),
        ("parts", c_void_p),
        ("namespaces", c_uint64),
        ("id_map", c_char_p),
    ]


class Assignment(NamedTuple):
    """What init passes to the process of a Python candidate.

    In the first process of a submission, `body` is the source: the process compiles it, and has the descriptors REPORT
    and GO. In the later processes `body` is the marshalled code.
    """

    cpu_time_s: float
    is_first: bool
    in_dialogue: bool  # 0 and 1 are pipes
    meta: bytes
    args: bytes
    body: bytes

    def pack(self) -> bytes:
        """As init does."""
        numbers = (self.is_first, self.in_dialogue, len(self.meta), len(self.args), len(self.body))
        return _ASSIGNMENT.pack(self.cpu_time_s, *numbers) + self.meta + self.args + self.body

    @staticmethod
    def unpack(assignment: bytes) -> Assignment:
        """From `struct assignment` and the texts behind it."""
        cpu_time_s, is_first, in_dialogue, num_meta, num_args, _ = _ASSIGNMENT.unpack_from(assignment)
        at = _ASSIGNMENT.size
        meta, args = assignment[at : at + num_meta], assignment[at + num_meta : at + num_meta + num_args]
        return Assignment(cpu_time_s, is_first, in_dialogue, meta, args, assignment[at + num_meta + num_args :])


class _Part(ctypes.Structure):
    """`struct iovec` of the C library."""

    _fields_ = [("address", c_uint64), ("num_bytes", c_uint64)]


def open_image(not_at: int) -> tuple[int, ctypes.Array[_Part]]:
    """A file with the writable memory of the interpreter, which candidates get from it (init/zygote.c), and its parts.

    The mapping with the address `not_at` is no part. The file has the size of all parts. Its pages are used by one test
    after the other, so the host allocates none. It is made once in the zygote, which must not unmap any part later.
    Raises OSError.
    """
    kernel.fix_heap_end()
    with open("/proc/self/maps", encoding="utf8", errors="surrogateescape") as maps:
        found = writable_parts(maps.read(), not_at)
    parts = (_Part * len(found))(*(_Part(*part) for part in found))
    fd = kernel.move_up(os.memfd_create("memory"))
    offset = 0
    for address, num_bytes in found:
        offset += kernel.write_memory(fd, address, num_bytes, offset)
    return fd, parts


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


class Init:
    """Made once in the zygote."""

    def __init__(
        self,
        settings: SlotSettings,
        isolation: Isolation,
        descriptors: tuple[int, int, int],
        filters: tuple[Any, ...],
    ) -> None:
        """`descriptors`: the two of the stream, and the socket to the partner's slot (-1: none). `filters`: without and
        with notifications.
        """
        # PyDLL keeps the interpreter lock, because a fork must not happen while the lock is released.
        self._library = ctypes.PyDLL(settings.init_library)
        self._serve = self._library.nouscoder_serve
        self._serve.restype = ctypes.py_object
        self._filters = filters
        with open("/proc/self/statm") as statm:
            vm_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        self._settings = _Settings(
            *descriptors,
            isolation.two_users,
            settings.kernel == "gvisor",
            isolation.last_pid,
            settings.tmp_bytes,
            settings.tmp_inodes,
            vm_bytes,
            *map(ctypes.addressof, filters),
            namespaces=isolation.namespaces,
            id_map=isolation.id_map,
        )

    def open_image(self) -> None:
        """Let candidates have their memory from a file. Called last before the first `serve`."""
        own = ctypes.addressof(c_void_p.in_dll(self._library, "nouscoder_image"))
        self._settings.image, self._parts = open_image(not_at=own)
        self._settings.num_parts = len(self._parts)
        self._settings.parts = ctypes.addressof(self._parts)

    def use_large_pages(self) -> None:
        """Move this process's memory to large pages, if the kernel has them, so that its forks are cheaper."""
        self._library.nouscoder_use_large_pages()

    def serve(self) -> bytes:
        """Serve one submission after the other (init/zygote.c). Raises OSError when the kernel refuses a step.

        Returns only in a candidate's process, with the bytes for `Assignment.unpack`. That process is confined. It has
        descriptors 0, 1 and 2, also 3 for call tests, and REPORT and GO until it has compiled.
        """
        assignment: bytes = self._serve(ctypes.byref(self._settings))
        return assignment
