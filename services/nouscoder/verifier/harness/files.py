"""The files behind descriptors 0, 1, 2 and 3 of one run, and whole reads and writes of descriptors."""

from __future__ import annotations

import os
from typing import NamedTuple

from .isolation import Isolation


class Files(NamedTuple):
    """Fresh for each run, so nothing of a run's descriptors (offsets, flags, locks) reaches the next."""

    stdin: int
    stdout: int
    stderr: int
    result: int | None

    @staticmethod
    def make(isolation: Isolation, files_dir: int, has_result: bool) -> Files:
        """Unlinked files in the tmpfs that only init has open."""
        fds = [isolation.unlinked_file(files_dir) for _ in range(3 + has_result)]
        return Files(fds[0], fds[1], fds[2], fds[3] if has_result else None)

    def close(self) -> None:
        """Free them."""
        for fd in self:
            if fd is not None:
                os.close(fd)


def read_all(fd: int, num_bytes: int) -> bytes:
    """The first `num_bytes` of a file, or what there is of them."""
    chunks, offset = [], 0
    while offset < num_bytes:
        chunk = os.pread(fd, num_bytes - offset, offset)
        if not chunk:
            break
        chunks.append(chunk)
        offset += len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it at the file's offset."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
