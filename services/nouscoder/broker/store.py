"""The only door to Redis: runs the Lua scripts of one run and maps Redis' errors once.

INVARIANT: all state of a run is under one prefix in Redis and none in this process; each script is one atom, so a
broker killed at any instant leaves no half of a transition behind.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from nouscoder.broker.errors import BrokerError, BrokerUnavailable
from nouscoder.broker.redis_address import without_password
from nouscoder.broker.rules import Rules

_FOLDER = Path(__file__).parent / "lua"
# Answers of a Redis that is there but cannot serve now: loading its file, disk full, out of memory, being replaced.
_PASSING = ("LOADING", "MISCONF", "OOM", "READONLY", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN")

Value = str | bytes | int | float


def _load_scripts() -> dict[str, str]:
    common = (_FOLDER / "common.lua").read_text(encoding="utf8")
    return {
        path.stem: common + path.read_text(encoding="utf8") for path in _FOLDER.glob("*.lua") if path.stem != "common"
    }


def _heed_cancellation() -> None:
    """Raise the cancellation that redis-py (8.1) swallows when it comes in the middle of a command.

    Without this a drain would wait for ever, and a call whose client is gone would go on leasing for it.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Store:
    """The scripts of the run `run` on the Redis at `url`. Nothing is connected before the first call."""

    def __init__(self, url: str, run: str, rules: Rules, timeout_s: float = 10.0) -> None:
        self.url = without_password(url)  # as it is told; the client below keeps the whole
        # Braces keep all keys of a run in one slot of a Redis cluster.
        self.prefix = f"nouscoder:{{{run}}}:"
        self._rules = rules.to_json()
        # One immediate second try: a pooled connection may be a dead one of a restarted Redis.
        self.redis = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(ConstantBackoff(0.05), 1),
        )
        self._scripts = {name: self.redis.register_script(text) for name, text in _load_scripts().items()}

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()

    async def run(self, script: str, *values: Value) -> Any:
        """Run one script. Raises BrokerUnavailable, or BrokerError for an answer that no script should get."""
        try:
            answer = await self._evaluate(script, values)
            _heed_cancellation()
            return answer
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            _heed_cancellation()
            raise BrokerUnavailable(f"Redis at {self.url} does not answer: {error}") from error
        except exceptions.RedisError as error:
            raise self._mapped(error) from error

    async def fields(self, keys: list[str], *fields: str) -> list[list[bytes | None]]:
        """The named fields of each hash, at one instant. Raises BrokerUnavailable."""
        try:
            async with self.redis.pipeline(transaction=True) as pipeline:
                for key in keys:
                    pipeline.hmget(self.prefix + key, list(fields))
                answers: list[list[bytes | None]] = await pipeline.execute()
            _heed_cancellation()
            return answers
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            _heed_cancellation()
            raise BrokerUnavailable(f"Redis at {self.url} does not answer: {error}") from error
        except exceptions.RedisError as error:
            raise self._mapped(error) from error

    async def _evaluate(self, script: str, values: tuple[Value, ...]) -> Any:
        try:
            return await self._call(script, values)
        except exceptions.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
        # A Redis that is new, or came back empty: the streams come first, then the same again.
        await self._call("open", ())
        return await self._call(script, values)

    async def _call(self, script: str, values: tuple[Value, ...]) -> Any:
        return await self._scripts[script](keys=[self.prefix], args=[self._rules, *values])

    def _mapped(self, error: exceptions.RedisError) -> BrokerError:
        text = str(error)
        if any(word in text for word in _PASSING):
            return BrokerUnavailable(f"Redis at {self.url} cannot serve now: {text}")
        return BrokerError(f"Redis at {self.url} answered: {text}")
