"""The folder in which a submission's runs work, /tmp, and the one that holds its compiled program, /program.

INVARIANT: when `clean` has returned, /tmp holds what every run finds there (main.py, or links to the compiled program)
and nothing else; a candidate can change none of that.
"""

from __future__ import annotations

import os

from . import kernel
from .frames import Given
from .isolation import Isolation
from .root import PROGRAM_FOLDER
from .settings import SlotSettings

WORK_FOLDER = "/tmp"
_CANDIDATE = "uid=1000,gid=1000"
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV


class Folder:
    """Of one submission; made by init, which alone may mount."""

    def __init__(self, settings: SlotSettings, isolation: Isolation) -> None:
        self._two_users = isolation.two_users
        self._size = f"size={settings.tmp_bytes},nr_inodes={settings.tmp_inodes}"
        self._script: tuple[str, bytes] | None = None
        self._links: tuple[str, ...] = ()
        self._names: list[str] = []

    def mount(self) -> None:
        """An empty /tmp."""
        kernel.mount("tmpfs", WORK_FOLDER, "tmpfs", _FLAGS, f"{self._size},mode=1777")

    def hold_script(self, name: str, source: bytes) -> None:
        """From now on runs find this file."""
        self._script = name, source
        self._names = [name]
        _write_file(f"{WORK_FOLDER}/{name}", source)

    def open_program(self, name: str, source: bytes) -> None:
        """Mount /program for the compiler to write in, with the source."""
        owner = _CANDIDATE if self._two_users else "uid=0,gid=0"
        kernel.mount("tmpfs", PROGRAM_FOLDER, "tmpfs", _FLAGS, f"{self._size},mode=755,{owner}")
        _write_file(f"{PROGRAM_FOLDER}/{name}", source)

    def seal_program(self) -> None:
        """Make /program read-only; from now on runs find links to all that it holds."""
        kernel.mount("tmpfs", PROGRAM_FOLDER, "", _FLAGS | kernel.MS_REMOUNT | kernel.MS_RDONLY)
        self._links = tuple(os.listdir(PROGRAM_FOLDER))
        self._names = sorted(self._links)
        self._renew()

    def give(self, given: Given) -> None:
        """The files of the next run. Raises FileExistsError when the program already has one of such a name."""
        for name, content in given.files:
            _write_file(f"{WORK_FOLDER}/{name}", content)

    def clean(self) -> None:
        """A fresh /tmp when the run left anything there; always when it ran as our own user."""
        if not self._two_users or sorted(os.listdir(WORK_FOLDER)) != self._names:
            self._renew()

    def _renew(self) -> None:
        kernel.unmount(WORK_FOLDER)
        self.mount()
        if self._script is not None:
            _write_file(f"{WORK_FOLDER}/{self._script[0]}", self._script[1])
        for name in self._links:
            os.symlink(f"{PROGRAM_FOLDER}/{name}", f"{WORK_FOLDER}/{name}")


def _write_file(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
