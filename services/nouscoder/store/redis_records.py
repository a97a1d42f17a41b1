"""Records as strings in the Redis of the run: the default, which needs no further set-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from redis import exceptions
from redis.asyncio import Redis

from nouscoder.store.record_store import ByteRange, RecordStoreError
from nouscoder.store.redis_errors import kind_of
from nouscoder.store.redis_strings import read_parts

_FAULTS = (exceptions.RedisError, OSError)


class RedisRecords:
    """The records of the run whose keys begin with `prefix`."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = f"{prefix}record:"

    async def put(self, records: Mapping[str, bytes]) -> None:
        """Write all in one command: a command costs this process about as much CPU as 100 kB of a record."""
        if not records:
            return
        try:
            await self._redis.mset({self._prefix + name: record for name, record in records.items()})
        except _FAULTS as error:
            raise RecordStoreError(
                f"Redis did not take records {', '.join(records)}: {kind_of(error)} {error}"
            ) from error

    async def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Read all ranges in one round trip."""
        if not ranges:
            return []
        parts = [((self._prefix + part.name).encode(), part.offset, part.num_bytes) for part in ranges]
        try:
            return await read_parts(self._redis, parts)
        except _FAULTS as error:
            raise RecordStoreError(f"Redis did not give {len(ranges)} records: {error}") from error

    async def delete(self, names: Sequence[str]) -> None:
        """UNLINK frees the memory outside of Redis' main thread."""
        if not names:
            return
        try:
            await self._redis.unlink(*(self._prefix + name for name in names))
        except _FAULTS as error:
            raise RecordStoreError(f"Redis did not delete {len(names)} records: {error}") from error
