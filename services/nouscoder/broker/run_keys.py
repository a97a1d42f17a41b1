"""Lists the runs in a Redis, and removes one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from redis import exceptions
from redis.asyncio import Redis

from nouscoder.broker.errors import BrokerUnavailable, Refused
from nouscoder.broker.redis_address import without_password
from nouscoder.broker.redis_client import open_client

_TIMEOUT_S = 5.0
# A broker that serves the run advances the run's clock at least once a second, but a busy machine may hold it back.
_TICK_WAIT_S = 5.0
_TICK_LOOKS = 20
_CHUNK = 500


@dataclass(frozen=True, slots=True)
class RunInRedis:
    """A run's state. `run_id` is empty before the first learner has sent its books."""

    name: str
    run_id: str
    batches: int
    step: int
    finished: bool


class RunKeys:
    """The runs of the Redis at `url`. Use as `async with`. Every method raises BrokerUnavailable."""

    def __init__(self, url: str) -> None:
        self.url = without_password(url)
        self._redis: Redis = open_client(url, _TIMEOUT_S)

    async def __aenter__(self) -> RunKeys:
        """Check that Redis answers."""
        try:
            await self._redis.ping()
        except (exceptions.RedisError, OSError) as error:
            await self._redis.aclose()
            raise BrokerUnavailable(f"Redis at {self.url} does not answer: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self._redis.aclose()

    async def runs(self) -> list[RunInRedis]:
        """Every run, by name."""
        names = [key async for key in self._redis.scan_iter("nouscoder:{*}:meta", count=1000)]
        return [await self._read(key) for key in sorted(names)]

    async def remove(self, run: str) -> int:
        """Delete the keys of a run; returns how many. Raises Refused while a broker serves the run."""
        meta = f"nouscoder:{{{run}}}:meta"
        if await self._redis.exists(meta) and await self._ticks(meta):
            raise Refused(f"a broker serves run {run} on the Redis at {self.url}: stop it first")
        removed, keys = 0, []
        async for key in self._redis.scan_iter(f"nouscoder:{{{_literally(run)}}}:*", count=1000):
            keys.append(key)
            if len(keys) == _CHUNK:
                removed += await self._redis.unlink(*keys)
                keys = []
        return removed + (await self._redis.unlink(*keys) if keys else 0)

    async def _ticks(self, meta: str) -> bool:
        """Whether a broker changes the run's tick. One that serves it does so each second, later on a busy machine."""
        before = await self._redis.hget(meta, "tick")
        for _ in range(_TICK_LOOKS):
            await asyncio.sleep(_TICK_WAIT_S / _TICK_LOOKS)
            if await self._redis.hget(meta, "tick") != before:
                return True
        return False

    async def _read(self, key: bytes | str) -> RunInRedis:
        text = key.decode() if isinstance(key, bytes) else key
        values = await self._redis.hmget(text, ["run_id", "batches_committed", "step", "finish_reason"])
        run_id, batches, step, reason = [value.decode() if isinstance(value, bytes) else value for value in values]
        name = text.removeprefix("nouscoder:{").removesuffix("}:meta")
        return RunInRedis(name, run_id or "", int(batches or 0), int(step or 0), reason is not None)


def _literally(run: str) -> str:
    """The name, escaped for a pattern of SCAN. The configuration allows no other special characters in a name."""
    return run.replace("[", "\\[")
