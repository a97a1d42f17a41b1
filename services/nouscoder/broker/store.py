"""The broker's access to Redis: runs the Lua scripts of one run, and maps errors of Redis to those of the broker.

INVARIANT: all state of a run is under one prefix in Redis, and none in this process. Each script is atomic, so a broker
that is killed leaves no half transition. A Redis whose memory is full refuses new rollouts only: scripts that free
memory, or add little, still run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from redis import exceptions

from nouscoder.broker.errors import BrokerError, BrokerUnavailable, RedisFull
from nouscoder.broker.redis_address import without_password
from nouscoder.broker.redis_client import open_client
from nouscoder.broker.rules import Rules
from nouscoder.store.redis_errors import PASSING, kind_of

_FOLDER = Path(__file__).parent / "lua"
# Scripts that Redis may refuse when its memory is full: those that add rollouts, and those that only read.
_NEED_MEMORY = frozenset(
    {
        *("announce_records", "keep_partials", "submit_rollouts"),
        *("status", "holders", "read_batch", "read_headers", "available", "letters"),
    }
)
# Redis refuses a script at maxmemory only if its first write may use more memory, and DEL never does. (The flag
# allow-oom of Redis 7 would say the same, but Redis 6 does not know it.)
_PASS_WHEN_FULL = "redis.call('DEL', P .. 'no such key')\n"

Answer = TypeVar("Answer")
Value = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that Redis uses, and its maxmemory; 0 when it has no limit."""

    used: int
    limit: int


def _load_scripts() -> dict[str, str]:
    common = (_FOLDER / "common.lua").read_text(encoding="utf8")
    scripts = {path.stem: path.read_text(encoding="utf8") for path in _FOLDER.glob("*.lua") if path.stem != "common"}
    return {name: common + ("" if name in _NEED_MEMORY else _PASS_WHEN_FULL) + text for name, text in scripts.items()}


def _raise_swallowed_cancellation() -> None:
    """Raise the cancellation that redis-py (8.1) swallows in the middle of a command.

    Without this a drain would wait for ever, and a call whose client is gone would continue to lease for it.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Store:
    """The scripts of the run `run` on the Redis at `url`. Nothing is connected before the first call."""

    def __init__(self, url: str, run: str, rules: Rules, timeout_s: float = 10.0) -> None:
        self.url = without_password(url)  # for messages
        # Braces keep all keys of a run in one slot of a Redis cluster.
        self.prefix = f"nouscoder:{{{run}}}:"
        self._rules = rules.to_json()
        self.redis = open_client(url, timeout_s)
        self._scripts = {name: self.redis.register_script(text) for name, text in _load_scripts().items()}

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()

    async def run(self, script: str, *values: Value) -> Any:
        """Run one script. Raises BrokerUnavailable, and BrokerError for any other error of Redis."""
        return await self._answer(self._evaluate(script, values))

    @asynccontextmanager
    async def answers_within(self, limit_s: float) -> AsyncIterator[None]:
        """Calls in this context raise BrokerUnavailable once `limit_s` seconds are over.

        Otherwise a Redis that accepts connections and answers nothing costs each call several time limits of redis-py.
        """
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise BrokerUnavailable(f"Redis at {self.url} does not answer: nothing came for {limit_s:.0f} s") from None

    async def fields(self, key: str, *fields: str) -> list[bytes | None]:
        """The named fields of the hash at this key, None for each that is missing. Raises BrokerUnavailable."""
        found: list[bytes | None] = await self._answer(self.redis.hmget(self.prefix + key, list(fields)))  # type: ignore[arg-type]
        return found

    async def get(self, key: str) -> bytes | None:
        """The string at this key, None when there is none. Raises BrokerUnavailable."""
        found: bytes | None = await self._answer(self.redis.get(self.prefix + key))  # type: ignore[arg-type]
        return found

    async def memory(self) -> Memory:
        """How full Redis is. Raises BrokerUnavailable, and BrokerError when the user of Redis lacks the permission."""
        info = await self._answer(self.redis.info("memory"))
        return Memory(int(info["used_memory"]), int(info.get("maxmemory", 0)))

    async def _answer(self, call: Awaitable[Answer]) -> Answer:
        """The result of `call`. Raises BrokerError for an error of Redis."""
        try:
            answer = await call
            _raise_swallowed_cancellation()
            return answer
        except (exceptions.RedisError, OSError) as error:
            _raise_swallowed_cancellation()
            if kind_of(error) in ("READONLY", "MASTERDOWN"):
                # Another Redis is the master now. A new connection looks up its address.
                await self.redis.connection_pool.disconnect(inuse_connections=False)
            raise self._mapped(error) from error

    async def _evaluate(self, script: str, values: tuple[Value, ...]) -> Any:
        try:
            return await self._call(script, values)
        except exceptions.ResponseError as error:
            if kind_of(error) != "NOGROUP":
                raise
        # Redis is new or was wiped: create the streams, then repeat the script.
        await self._call("open", ())
        return await self._call(script, values)

    async def _call(self, script: str, values: tuple[Value, ...]) -> Any:
        return await self._scripts[script](keys=[self.prefix], args=[self._rules, *values])

    def _mapped(self, error: exceptions.RedisError | OSError) -> BrokerError:
        kind, text = kind_of(error), str(error)
        if kind == "OOM":
            return RedisFull(f"Redis at {self.url} is full (maxmemory): {text}")
        if kind in PASSING:
            return BrokerUnavailable(f"Redis at {self.url} cannot serve now, {kind}: {text}")
        if kind == "WRONGPASS":
            return BrokerUnavailable(f"Redis at {self.url} does not accept the user or password: {text}")
        if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
            return BrokerUnavailable(f"Redis at {self.url} does not answer: {text}")
        if kind == "NOPERM":
            return BrokerError(f"the user of Redis at {self.url} lacks a permission (docs/redis-keys.md): {text}")
        if kind in ("MOVED", "ASK"):
            return BrokerError(f"Redis at {self.url} is a node of a cluster that does not hold this run: {kind} {text}")
        return BrokerError(f"Redis at {self.url} answered: {text}")
