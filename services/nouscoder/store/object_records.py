"""Records as objects of an object store (S3 and compatible ones, GCS, Azure), through obstore."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import ObjectStore, from_url

from nouscoder.store.record_store import ByteRange, RecordStoreError


class ObjectRecords:
    """The records under the URL of a bucket and prefix. Credentials come from the cloud's environment variables."""

    def __init__(self, url: str) -> None:
        """Raises RecordStoreError for a URL of an unknown kind."""
        self._url = url
        try:
            self._store: ObjectStore = from_url(url)
        except (BaseError, ValueError) as error:
            raise RecordStoreError(f"broker.records.url {url} names no object store: {error}") from error

    async def put(self, records: Mapping[str, bytes]) -> None:
        """Write one object for each record, concurrently."""
        await asyncio.gather(*(self._put(name, record) for name, record in records.items()))

    async def _put(self, name: str, record: bytes) -> None:
        try:
            await obstore.put_async(self._store, name, record)
        except (BaseError, OSError) as error:
            raise RecordStoreError(f"{self._url} did not take record {name}: {error}") from error

    async def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Read all ranges concurrently."""
        return await asyncio.gather(*(self._read(part) for part in ranges))

    async def _read(self, part: ByteRange) -> bytes:
        try:
            end = part.offset + part.num_bytes
            return bytes(await obstore.get_range_async(self._store, part.name, start=part.offset, end=end))
        except (NotFoundError, FileNotFoundError):
            return b""
        except (BaseError, OSError) as error:
            raise RecordStoreError(f"{self._url} did not give record {part.name}: {error}") from error

    async def delete(self, names: Sequence[str]) -> None:
        """Delete all objects concurrently."""
        await asyncio.gather(*(self._delete(name) for name in names))

    async def _delete(self, name: str) -> None:
        try:
            await obstore.delete_async(self._store, name)
        except (NotFoundError, FileNotFoundError):
            return
        except (BaseError, OSError) as error:
            raise RecordStoreError(f"{self._url} did not delete record {name}: {error}") from error
