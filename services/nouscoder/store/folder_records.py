"""Records as files in a folder, for runs whose records do not fit in the memory of Redis.

INVARIANT: a file with the name of a record is
whole: it was written under another name and renamed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from nouscoder.store.record_store import ByteRange, RecordStoreError

Answer = TypeVar("Answer")

_NUM_FOLDERS = 256


class FolderRecords:
    """The records in `folder`, spread over subfolders. Each call runs in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, records: Mapping[str, bytes]) -> None:
        """Write each file under another name, then rename it."""

        def write() -> None:
            for name, record in records.items():
                path = self._path(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f".{name}.{secrets.token_hex(4)}")
                try:
                    with part.open("wb") as output:
                        output.write(record)
                        output.flush()
                        os.fsync(output.fileno())
                    part.rename(path)
                finally:
                    part.unlink(missing_ok=True)

        await self._in_thread(f"write records {', '.join(records)}", write)

    async def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Each range from its file."""
        return await self._in_thread(f"read {len(ranges)} records", lambda: [self._read(part) for part in ranges])

    async def delete(self, names: Sequence[str]) -> None:
        """Unlink the files."""

        def unlink() -> None:
            for name in names:
                self._path(name).unlink(missing_ok=True)

        await self._in_thread(f"delete {len(names)} records", unlink)

    def _path(self, name: str) -> Path:
        return self._folder / f"{zlib.crc32(name.encode()) % _NUM_FOLDERS:02x}" / name

    def _read(self, part: ByteRange) -> bytes:
        try:
            with self._path(part.name).open("rb") as file:
                file.seek(part.offset)
                return file.read(part.num_bytes)
        except FileNotFoundError:
            return b""

    async def _in_thread(self, what: str, work: Callable[[], Answer]) -> Answer:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise RecordStoreError(f"could not {what} in {self._folder}: {error.strerror or error}") from error
