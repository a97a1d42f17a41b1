"""The lock that lets one process at a time work in a folder.

INVARIANT: of all processes that lock the same file, one holds it; the lock ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
from io import TextIOWrapper
from pathlib import Path

from nouscoder.errors import NousCoderError


class FolderInUse(NousCoderError):
    """Another process works in the folder now; the message names the folder."""


def lock_file(file: Path, message: str) -> TextIOWrapper:
    """Lock `file`, which is made if it is missing; close what is returned to unlock it.

    Raises FolderInUse with `message` when another process holds the lock, and OSError.
    """
    lock = file.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise FolderInUse(message) from None
    return lock
