"""A lock that allows one process at a time to work in a folder.

INVARIANT: at most one process holds the lock of a file. The lock is released when its process exits for any reason.
"""

from __future__ import annotations

import fcntl
from io import TextIOWrapper
from pathlib import Path

from nouscoder.errors import NousCoderError


class FolderInUse(NousCoderError):
    """Another process works in the folder. The message names the folder."""


def lock_file(file: Path, message: str) -> TextIOWrapper:
    """Lock `file`, which is created if it is missing. Close the returned file to unlock it.

    Raises FolderInUse with `message` when another process holds the lock, and OSError.
    """
    lock = file.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise FolderInUse(message) from None
    return lock
