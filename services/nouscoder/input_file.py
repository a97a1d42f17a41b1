"""Files that people give: none whose reader might wait for ever, and JSON objects with the caller's own error.

An open pipe may be read, as `<(command)` and /dev/stdin name one: its writer ends it. So may /dev/null.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nouscoder.errors import Unusable, why_unreadable

_KINDS = {
    **{stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"},
    **{stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"},
}


class NoRegularFile(Unusable, OSError):
    """An input file is a pipe, a socket or a device. Whoever reads files tells it like another error of the system."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def kind_of(path: Path) -> str:
    """What is there, in words: `a folder`, `a pipe`. Raises OSError."""
    return _KINDS[stat.S_IFMT(path.stat().st_mode)]


def regular(file: Path, *, often: bool = False) -> Path:
    """The same file, or the folder of such files. Raises OSError, which is NoRegularFile for one of another kind.

    A file that is read `often`, more than once, may not be an open pipe either.
    """
    for each in file.iterdir() if file.is_dir() else ():
        if each.exists() and not each.is_dir():
            regular(each)
    kind, is_open = kind_of(file), os.path.realpath(file).startswith("/proc/") and not often
    if kind not in ("a file", "a folder") and not is_open and not file.samefile(os.devnull):
        raise NoRegularFile(errno.EINVAL, f"it is {kind}, not a regular file", str(file))
    return file


def json_object(file: Path) -> dict[str, Any]:
    """The object in `file`; empty when there is none that can be read."""
    with suppress(OSError, ValueError):
        value = json.loads(regular(file).read_text(encoding="utf-8-sig"))
        return value if isinstance(value, dict) else {}
    return {}


def read_json_object(file: Path, unreadable: Callable[[str], Exception]) -> dict[str, Any]:
    """The object in `file`. Raises `unreadable` with a sentence that names the file when there is none."""
    try:
        value = json.loads(regular(file).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise unreadable(f"{file} cannot be read: {why_unreadable(error)}") from error
    if not isinstance(value, dict):
        raise unreadable(f"{file} cannot be read: it holds no JSON object")
    return value
