"""The client for the URL of a Redis: one server, or the master that Sentinels name.

redis://HOST:PORT/DB, rediss:// (TLS), unix://PATH, and redis+sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/MASTER[/DB]
or rediss+sentinel:// (TLS to master and Sentinels). Both accept the options that redis-py
reads from the query of its URLs, such as ?ssl_ca_certs=FILE.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ConstantBackoff

from nouscoder.broker.errors import BrokerUnavailable, Refused
from nouscoder.broker.redis_address import without_password
from nouscoder.config import Config
from nouscoder.errors import Unusable

log = logging.getLogger(__name__)

_SENTINEL = "+sentinel"
_SENTINEL_PORT = 26379
# Redis runs one command at a time: with more connections, commands would wait there instead of here.
_MAX_CONNECTIONS = 32
_POOL_PATIENCE_S = 20.0
_OF_THE_POOL = ("max_connections", "timeout")


def open_client(url: str, timeout_s: float) -> redis.asyncio.Redis:
    """A client; nothing is connected yet. Raises Unusable."""
    # When all connections are in use, a command waits for one. A command is tried twice, because a pooled connection is
    # dead after a restart of Redis.
    common: dict[str, Any] = {
        "max_connections": _MAX_CONNECTIONS,
        "timeout": _POOL_PATIENCE_S,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(ConstantBackoff(0.05), 1),
    }
    try:
        if not url.partition("://")[0].endswith(_SENTINEL):
            return redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool.from_url(url, **common))
        return _master_of(url, common)
    except (ValueError, TypeError) as error:
        raise Unusable(f"the URL of Redis cannot be used: {error}") from error


def _master_of(url: str, common: dict[str, Any]) -> redis.asyncio.Redis:
    parts = urlsplit(url)
    is_encrypted = parts.scheme.startswith("rediss")
    user, _, addresses = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    master, _, database = parts.path.strip("/").partition("/")
    if not master:
        raise ValueError("a Sentinel URL ends with /MASTER, the name of the master")
    # redis-py converts the options of the query by their names.
    options = {k: v for k, v in parse_url(f"redis://host?{parts.query}").items() if k not in ("host", "port", "db")}
    options |= {**common, "ssl": is_encrypted}
    logins = {"username": unquote(name) or None, "password": unquote(password) or None}
    sentinels: Any = Sentinel(  # type: ignore[no-untyped-call]
        [_host_and_port(one) for one in addresses.split(",")],
        sentinel_kwargs={name: value for name, value in {**options, **logins}.items() if name not in _OF_THE_POOL},
    )
    client: redis.asyncio.Redis = sentinels.master_for(
        unquote(master), connection_pool_class=_BlockingSentinelPool, db=int(database or 0), **options, **logins
    )
    return client


class _BlockingSentinelPool(SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """Connections to the master. When all are in use, a command waits for one."""


def _host_and_port(address: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    if not separator:
        host, port = address, str(_SENTINEL_PORT)
    if not host or not port.isdigit():
        raise ValueError(f"{address!r} is not HOST:PORT of a Sentinel")
    return host.strip("[]"), int(port)


_TIMEOUT_S = 5.0
# A broker that serves the run advances the run's clock at least once a second, but a busy machine may hold it back.
_TICK_WAIT_S = 5.0
_TICK_LOOKS = 20
_CHUNK = 500
_STAGE_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class RunInRedis:
    """A run's state. `run_id` is empty before the first learner has sent its state."""

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


# Which stage of a plan the broker serves, when services are external: a string in Redis, `nouscoder:{PLAN}:stage`.
# `nouscoder train` chooses it when a stage begins, and again while the stage runs. The other services ask the broker
# for the name of its run (run/stages.py).


class Stages:
    """The stages of the plan `config` on the Redis at `url`. `another` is set when another one was chosen.

    INVARIANT: a broker serves the stage that Redis names, or the first one when Redis names none. A stage that was
    chosen is in Redis before the call returns.
    """

    def __init__(self, config: Config, url: str) -> None:
        self._config = config
        self._key = f"nouscoder:{{{config.run.name}}}:stage"
        self._redis = open_client(url, _STAGE_LIMIT_S)
        self.another = asyncio.Event()

    async def current(self) -> Config:
        """The run of the stage to serve. Raises BrokerUnavailable."""
        self.another.clear()
        try:
            run = await self._redis.get(self._key)
        except exceptions.RedisError as error:
            raise BrokerUnavailable(f"Redis does not answer: {error}") from error
        name = run.decode() if isinstance(run, bytes) else run or ""
        return self._config.stage_run(self._config.stage_named(name) or 0)

    async def choose(self, run: str) -> None:
        """Serve the stage with this run from now on. Raises Refused and BrokerUnavailable."""
        if self._config.stage_named(run) is None:
            raise Refused(f"{run} is no stage of the plan {self._config.run.name}")
        try:
            await self._redis.set(self._key, run)
        except exceptions.RedisError as error:
            raise BrokerUnavailable(f"Redis does not answer: {error}") from error
        log.info("another stage begins", extra={"run": run})
        self.another.set()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
