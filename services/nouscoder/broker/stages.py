"""Which stage of a plan the broker serves, when services are external: a string in Redis, `nouscoder:{PLAN}:stage`.

`nouscoder train` chooses it when a stage begins, and again while the stage runs. The other services ask the broker for
the name of its run (run/stages.py).

INVARIANT: a broker serves the stage that Redis names, or the first one when Redis names none. A stage that was chosen
is in Redis before the call returns.
"""

from __future__ import annotations

import asyncio
import logging

import redis

from nouscoder.broker.errors import BrokerUnavailable, Refused
from nouscoder.broker.redis_client import open_client
from nouscoder.config import Config

_TIMEOUT_S = 10.0
log = logging.getLogger(__name__)


class Stages:
    """The stages of the plan `config` on the Redis at `url`. `another` is set when another one was chosen."""

    def __init__(self, config: Config, url: str) -> None:
        self._config = config
        self._key = f"nouscoder:{{{config.run.name}}}:stage"
        self._redis = open_client(url, _TIMEOUT_S)
        self.another = asyncio.Event()

    async def current(self) -> Config:
        """The run of the stage to serve. Raises BrokerUnavailable."""
        self.another.clear()
        try:
            run = await self._redis.get(self._key)
        except redis.RedisError as error:
            raise BrokerUnavailable(f"Redis does not answer: {error}") from error
        name = run.decode() if isinstance(run, bytes) else run or ""
        return self._config.stage_run(self._config.stage_named(name) or 0)

    async def choose(self, run: str) -> None:
        """Serve the stage with this run from now on. Raises Refused and BrokerUnavailable."""
        if self._config.stage_named(run) is None:
            raise Refused(f"{run} is no stage of the plan {self._config.run.name}")
        try:
            await self._redis.set(self._key, run)
        except redis.RedisError as error:
            raise BrokerUnavailable(f"Redis does not answer: {error}") from error
        log.info("another stage begins", extra={"run": run})
        self.another.set()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
