"""An append-only file of JSON records, one a line, each under the key of what it depends on. It is also a cache.

INVARIANT: a record is whole or not there, and there is one for each key. A line is written by one write that ends with
its newline, so a killed process loses at most the line that it was writing; opening the file cuts such a torn line.
Only keys and places are in memory, never the records.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from nouscoder.atomic_files import naming_storage_faults
from nouscoder.errors import Unusable

_BEGIN = b'{"key": '  # of each line


class LogUnusable(Unusable):
    """A file of records holds a line that is no such record. The message names the file and the line."""


def key_of(content: object) -> str:
    """The key of a content of JSON values."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class RecordLog:
    """The records of one file, for one process at a time."""

    def __init__(self, path: Path, *fields: str) -> None:
        """Open the file, made if missing. Each record has at least `fields`. Raises LogUnusable and StorageError."""
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}
        with naming_storage_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = 0
        try:
            self._read({"key", *fields})
        except LogUnusable:
            self.close()
            raise

    def _read(self, fields: set[str]) -> None:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and line[: len(_BEGIN)] == _BEGIN[: len(line)]:
                    os.ftruncate(self._file, self._end)
                    return
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if not isinstance(record, dict) or not fields <= record.keys():
                    raise LogUnusable(
                        f"{self.path}, line {number} is not a record with {', '.join(sorted(fields))}: delete the"
                        " line, and what it held is made again"
                    )
                self._places[str(record["key"])] = (self._end, len(line))
                self._end += len(line)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._places])  # in the order of the file

    def get(self, key: str) -> dict[str, Any]:
        """The record of this key. Raises KeyError."""
        place, size = self._places[key]
        record: dict[str, Any] = json.loads(os.pread(self._file, size, place))
        return record

    def add(self, key: str, fields: dict[str, Any]) -> None:
        """Write a record, unless there is one with this key. Raises StorageError."""
        if key in self._places:
            return
        line = (json.dumps({"key": key, **fields}) + "\n").encode()
        with naming_storage_faults(self.path):
            written = os.write(self._file, line)
            if written < len(line):  # the disk is full: the next write would continue a torn line
                os.ftruncate(self._file, self._end)
                raise OSError(f"only {written} of {len(line)} bytes were written")
        self._places[key] = (self._end, len(line))
        self._end += len(line)

    @property
    def num_bytes(self) -> int:
        """The size of the whole records."""
        return self._end

    def sync(self) -> None:
        """Wait until the records are on the disk. Raises StorageError."""
        with naming_storage_faults(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
