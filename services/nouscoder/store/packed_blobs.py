"""Small blobs of a folder, packed into one file: a file for each of 100,000 tests costs minutes and hundreds of MB.

INVARIANT: a blob that was put is read back from then on, and is on the disk after `flush`, whole or not at all. Several
processes may read and write: a write locks the file for as long as a piece of the blobs takes to be written.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 8 * 1024
_FLUSH_BYTES = 4 * 1024**2
_LOCK_LIMIT_S = 60.0


class PackedBlobs:
    """The file PLACE, an SQLite database, which is made with the first blob. Methods raise sqlite3.Error."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._database: sqlite3.Connection | None = None
        self._pending: dict[str, bytes] = {}
        self._pending_bytes = 0
        self._lock = threading.RLock()

    def put(self, name: str, data: bytes) -> None:
        """Keep a blob; on the disk after `flush`."""
        with self._lock:
            self._pending[name] = data
            self._pending_bytes += len(data)
            if self._pending_bytes >= _FLUSH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what was put."""
        with self._lock:
            if not self._pending:
                return
            self._place.parent.mkdir(parents=True, exist_ok=True)
            with self._opened() as database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS blobs (name TEXT PRIMARY KEY, modified_s REAL, data BLOB) WITHOUT ROWID"
                )
                rows = ((name, time.time(), data) for name, data in self._pending.items())
                database.executemany("INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)", rows)
            self._pending, self._pending_bytes = {}, 0

    def read(self, name: str) -> bytes | None:
        """A blob; None if there is none of this name."""
        with self._lock:
            if name in self._pending:
                return self._pending[name]
            row: tuple[bytes] | None = next(self._rows("SELECT data FROM blobs WHERE name = ?", name), None)
            return None if row is None else row[0]

    def delete(self, name: str) -> None:
        """Delete a blob, if there is one."""
        with self._lock:
            self._pending.pop(name, None)
            if self.read(name) is not None:
                with self._opened() as database:
                    database.execute("DELETE FROM blobs WHERE name = ?", (name,))

    def list(self, prefix: str) -> list[tuple[str, int, float]]:
        """(name, bytes, modified_s) of the blobs in a folder."""
        with self._lock:
            self.flush()
            asked = "SELECT name, length(data), modified_s FROM blobs WHERE substr(name, 1, ?) = ?"
            return list(self._rows(asked, len(prefix) + 1, f"{prefix}/"))

    def _rows(self, asked: str, *values: object) -> Iterator[Any]:
        if self._database is None and not (self._place.exists() and self._place.stat().st_size):
            return iter(())  # a killed writer may leave an empty file
        return self._opened().execute(asked, values)

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            self._database = sqlite3.connect(self._place, _LOCK_LIMIT_S, check_same_thread=False)
        return self._database
