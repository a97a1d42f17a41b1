"""What workers have sampled: rollout records, and the tokens of rollouts that are being sampled.

INVARIANT: each write has its own name, so neither a late writer nor the deletion of a refused record touches a record
that was taken. Only those to whom the broker gave a name can read its record. A record is deleted when its rollout has
ended, or FORGET_RECORD_S (store.py) after it was announced if no rollout took it.

The tokens of rollouts that are being sampled are kept so that another worker can continue them. INVARIANT: what is kept
of a rollout is its beginning, as one worker after the other sampled it. Only the holder of the lease adds to it. It is
gone as soon as the rollout is submitted or has ended.

A piece has about 8 bytes a token, and with router replay layers * top_k bytes more. It goes through the script that
checks the lease, so check and append are one step.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from nouscoder.broker.errors import BrokerUnavailable, InvalidRequest, RedisFull
from nouscoder.broker.store import MemoryWatch, Store, Value
from nouscoder.broker.streams import Stream, parse_lease
from nouscoder.broker.wakeups import Waits
from nouscoder.config import Config, RecordBackend
from nouscoder.domain.partial import EncodedPiece
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


_ROLLOUT_ID = re.compile(r"g\d+-\d+")
# A piece has an id for each token, and a log-probability for each sampled one.
_MIN_TOKEN_BYTES = 4
_LOST = -1


class Partials:
    """The kept tokens of one run."""

    def __init__(self, store: Store, memory: MemoryWatch, waits: Waits) -> None:
        self._store = store
        self._memory = memory
        self._waits = waits

    async def keep(self, worker_id: str, pieces: Sequence[EncodedPiece]) -> list[int]:
        """Add the pieces; returns for each how many tokens of its rollout are kept then, -1 when the lease is lost.

        A piece from token 0 on replaces what is kept. Any other is added only if it begins where the kept tokens end.
        While no group is admitted, nothing is taken, so that sampled rollouts have the room: raises RedisFull. Raises
        InvalidRequest.
        """
        values = [value for piece in pieces for value in _values(piece)]
        if not values:
            return []
        if not self._memory.pressure.admits:
            raise RedisFull(self._memory.pressure.reason)
        kept = [int(number) for number in await self._store.run("keep_partials", worker_id, *values)]
        if _LOST in kept:
            self._waits.tasks.wake()  # groups that were too old freed slots
        return kept

    async def read(self, rollout_id: str) -> bytes:
        """The pieces of a rollout, one after another; empty when nothing is kept. Raises InvalidRequest."""
        if _ROLLOUT_ID.fullmatch(rollout_id) is None:
            raise InvalidRequest(f"{rollout_id[:100]!r} is not a rollout of this broker")
        return await self._store.get(f"partial:{rollout_id}") or b""


def _values(piece: EncodedPiece) -> list[Value]:
    """As the script takes them. Raises InvalidRequest when the numbers cannot be true."""
    ref, num_tokens = parse_lease(piece.lease_id), piece.end_token - piece.first_token
    if ref.stream is not Stream.TASKS:
        raise InvalidRequest(f"lease {ref} is on {ref.stream}, not on tasks")
    if num_tokens < 1 or len(piece.data) < _MIN_TOKEN_BYTES * num_tokens:
        raise InvalidRequest(f"a piece of {num_tokens} tokens does not have {len(piece.data)} bytes")
    if piece.oldest_version > piece.newest_version:
        raise InvalidRequest("the oldest version of a piece is newer than its newest")
    numbers = (piece.first_token, piece.end_token, piece.oldest_version, piece.newest_version)
    return [ref.entry, ref.ticket, *numbers, piece.data]
