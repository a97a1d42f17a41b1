"""Records as strings in the Redis of the run: the default, which needs no further set-up."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from redis import exceptions
from redis.asyncio import Redis

from nouscoder.store.record_store import ByteRange, RecordStoreError
from nouscoder.store.redis_reads import read_parts

# The kind of an error of Redis, such as OOM. Redis sends it as the first word of the message, in capitals. redis-py
# turns some kinds into exception classes and removes the word. For an error inside a script, Redis 6 puts the word in
# the middle of the message.

# Redis answers but cannot serve now: it loads its file, runs a long script, its disk or memory is full, another one
# replaces it, it lacks its replicas, or it was restarted or wiped between two commands of one call.
PASSING = frozenset(
    {
        *("LOADING", "BUSY", "MISCONF", "OOM", "READONLY", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"),
        *("TRYAGAIN", "CLUSTERDOWN", "NOSCRIPT", "NOGROUP"),
    }
)

_BY_TYPE: dict[type[Exception], str] = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MovedError: "MOVED",
    exceptions.AskError: "ASK",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.AuthenticationError: "WRONGPASS",
    exceptions.NoScriptError: "NOSCRIPT",
}
_FIRST_WORD = re.compile(r"([A-Z]{3,}) ")
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -?([A-Z]{3,}) ")


def kind_of(error: BaseException) -> str:
    """The kind, for example OOM; ERR when it has none."""
    for ancestor in type(error).__mro__:
        if ancestor in _BY_TYPE:
            return _BY_TYPE[ancestor]
    text = str(error)
    found = _IN_SCRIPT.search(text) or _FIRST_WORD.match(text)
    return found[1] if found else "ERR"


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
