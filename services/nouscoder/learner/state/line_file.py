"""A file of JSON lines, one for each key, each with the step that it belongs to.

INVARIANT: after `open` a LineFile has whole lines only, none after the last step, and one for each key; `append` adds
only lines whose key is missing, and they are durable when it returns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import naming_storage_faults, write_whole

Line = dict[str, Any]


class LineFile:
    """See the module. `key` returns the identity of a line."""

    def __init__(self, file: Path, key: Callable[[Line], Hashable]) -> None:
        self._file = file
        self._key = key
        self._known: set[Hashable] = set()

    def open(self, last_step: int) -> list[Line]:
        """Read the file. Remove incomplete lines and lines after `last_step`. Returns the rest. Raises StorageError."""
        kept: dict[Hashable, Line] = {}
        for text in self._file.read_text(encoding="utf8").split("\n") if self._file.exists() else []:
            try:
                line = json.loads(text)
            except ValueError:
                continue  # incomplete after a crash during a write
            if line["step"] <= last_step:
                kept.setdefault(self._key(line), line)
        write_whole(self._file, "".join(map(_text, kept.values())).encode())
        self._known = set(kept)
        return [*kept.values()]

    def knows(self, key: Hashable) -> bool:
        """Whether there is a line of this key."""
        return key in self._known

    def append(self, lines: Iterable[Line]) -> None:
        """Add the missing lines. Raises StorageError."""
        missing = {self._key(line): line for line in lines if self._key(line) not in self._known}
        with naming_storage_faults(self._file), self._file.open("a", encoding="utf8") as output:
            output.write("".join(map(_text, missing.values())))
            output.flush()
            os.fsync(output.fileno())
        self._known |= missing.keys()


def _text(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
