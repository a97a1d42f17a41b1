"""Rollout records in the broker: their names, writing, streaming in chunks, and deletion.

INVARIANT: each write has its own name, so neither a late writer nor the deletion of a refused record touches a record
that was taken. Only those to whom the broker gave a name can read its record. A record is deleted when its rollout has
ended, or FORGET_RECORD_S (rules.py) after it was announced if no rollout took it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from nouscoder.broker.errors import BrokerUnavailable, InvalidRequest
from nouscoder.broker.store import Store
from nouscoder.config import Config, RecordBackend
from nouscoder.store.record_store import ByteRange, RecordStore, RecordStoreError

log = logging.getLogger(__name__)

CHUNK_BYTES = 512 * 1024
_MAX_PIECES = 256
_MAX_RANGES = 65536
_MAX_STREAMS = 8
_MAX_DELETED = 256
# Calls of `write` that use the store at the same time.
_MAX_PUTS = 8
_NAME = re.compile(r"g\d+-\d+\.[0-9a-f]{16}")
_NAME_BYTES = 8

Piece = tuple[int, bytes]  # the range's place in the request, and some of its bytes


def open_record_store(config: Config, store: Store) -> RecordStore:
    """The store that the configuration names. Raises RecordStoreError."""
    records = config.broker.records
    if records.backend is RecordBackend.FOLDER:
        from nouscoder.store.folder_records import FolderRecords

        return FolderRecords(config.in_run_folder(records.folder))
    if records.backend is RecordBackend.OBJECT_STORE:
        from nouscoder.store.object_records import ObjectRecords

        return ObjectRecords(records.url)
    from nouscoder.store.redis_records import RedisRecords

    return RedisRecords(store.redis, store.prefix)


def new_record_name(rollout_id: str) -> str:
    """A name for one write of a record of this rollout. A lease id would not do: its work may be submitted twice."""
    return f"{rollout_id}.{secrets.token_hex(_NAME_BYTES)}"


class Records:
    """Records of one run, kept in `kept`. Every method raises BrokerUnavailable while that store does not answer."""

    def __init__(self, store: Store, kept: RecordStore) -> None:
        self._store = store
        self._kept = kept
        self._streams = asyncio.Semaphore(_MAX_STREAMS)
        self._puts = asyncio.Semaphore(_MAX_PUTS)

    async def write(self, records: Mapping[str, bytes]) -> None:
        """Announce the names, then keep the records. Raises InvalidRequest for a malformed name."""
        await self._store.run("announce_records", *(_checked(name) for name in records))
        try:
            async with self._puts:
                await self._kept.put(records)
        except RecordStoreError as error:
            raise BrokerUnavailable(str(error)) from error

    async def stream(self, ranges: Sequence[ByteRange]) -> AsyncIterator[list[Piece]]:
        """The bytes of the ranges in order, about CHUNK_BYTES at a time. Raises InvalidRequest."""
        if len(ranges) > _MAX_RANGES:
            raise InvalidRequest(f"ask for at most {_MAX_RANGES} ranges at once, not {len(ranges)}")
        for part in ranges:
            _checked(part.name)
            if part.num_bytes < 1:
                raise InvalidRequest(f"a range of record {part.name} asks for no bytes")
        for chunk in _chunks(ranges):
            async with self._streams:
                try:
                    data = await self._kept.read([part for _, part in chunk])
                except RecordStoreError as error:
                    raise BrokerUnavailable(str(error)) from error
            yield [(place, found) for (place, _), found in zip(chunk, data, strict=True)]

    async def delete_garbage(self) -> None:
        """Delete the records of rollouts that ended, and those that no rollout took."""
        deleted: list[str] = []
        while True:
            names = [name.decode() for name in await self._store.run("garbage", _MAX_DELETED, *deleted)]
            if not names:
                return
            try:
                await self._kept.delete(names)
            except RecordStoreError as error:
                raise BrokerUnavailable(str(error)) from error
            deleted = names


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(f"{name[:100]!r} is not the name of a record of this broker")
    return name


def _chunks(ranges: Sequence[ByteRange]) -> Iterator[list[tuple[int, ByteRange]]]:
    """The ranges, each with its place, cut into lists of at most CHUNK_BYTES and _MAX_PIECES."""
    chunk: list[tuple[int, ByteRange]] = []
    room = CHUNK_BYTES
    for place, whole in enumerate(ranges):
        offset, end = whole.offset, whole.offset + whole.num_bytes
        while offset < end:
            size = min(end - offset, room)
            chunk.append((place, ByteRange(whole.name, offset, size)))
            offset, room = offset + size, room - size
            if not room or len(chunk) == _MAX_PIECES:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk
