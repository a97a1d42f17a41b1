"""The interface of the stores that keep rollout records while their rollouts are in flight (`broker.records`).

A record is opaque bytes. A name is never used for different bytes. The broker announces a name before it writes the
record (broker/lua/announce_records.lua), so the record of a refused rollout can be found and deleted.

The store for records that do not fit in the memory of Redis is a folder. INVARIANT: a file with the name of a record is
whole: it was written under another name and renamed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar


class RecordStoreError(Exception):
    """The store does not answer or cannot write; the same call may succeed later."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`num_bytes` of the record `name` from `offset` on."""

    name: str
    offset: int
    num_bytes: int


class RecordStore(Protocol):
    """Every method raises RecordStoreError."""

    async def put(self, records: Mapping[str, bytes]) -> None:
        """Keep records by name. After an error some are kept; putting the same ones again is allowed."""

    async def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range: none if there is no such record, fewer if the record ends before."""

    async def delete(self, names: Sequence[str]) -> None:
        """Delete records. Names without a record are ignored."""


# Records as files in a folder, for runs whose records do not fit in the memory of Redis.

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
