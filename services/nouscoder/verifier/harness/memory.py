"""Memory of a run's whole process tree, looked at while it runs: rlimits bound one process, not their sum.

A look costs a few system calls a process and happens every LOOK_EVERY_S, so short tests are never looked at; in that
time two cores can fill a few hundred MiB more than the limit. Shared mappings count once, at their largest.
"""

from __future__ import annotations

import os
import resource

LOOK_EVERY_S = 0.05
_PAGE_BYTES = resource.getpagesize()


class MemoryWatch:
    """Reads `proc_fd`, a proc mount that shows every process of the namespace and that candidates cannot reach."""

    def __init__(self, proc_fd: int, *, forked: bool) -> None:
        """`forked` processes share the warm interpreter's memory, which then counts for nothing."""
        self._proc_fd = proc_fd
        self._own = None if forked else (0, 0)

    def used_bytes(self) -> int:
        """What the processes hold (beyond what each shares with the warm interpreter it was forked from)."""
        if self._own is None:  # only now: most runs end before the first look
            self._own = self._look("1")
        own_private, own_shared = self._own
        private = shared = 0
        for name in os.listdir(self._proc_fd):
            if not name.isdigit() or name == "1":
                continue
            try:
                own, common = self._look(name)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            private += max(0, own - own_private)
            shared = max(shared, common - own_shared)
        return (private + shared) * _PAGE_BYTES

    def _look(self, name: str) -> tuple[int, int]:
        """(private pages, shared pages) resident."""
        fd = os.open(f"{name}/statm", os.O_RDONLY, dir_fd=self._proc_fd)
        try:
            fields = os.read(fd, 256).split()
        finally:
            os.close(fd)
        resident, shared = int(fields[1]), int(fields[2])
        return resident - shared, shared
