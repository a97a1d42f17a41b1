"""A real Redis for tests that loses its last writes or all of them, runs out of memory, stops, or dies, on request.

INVARIANT: a copy that `remember` makes holds every write that Redis acknowledged before it, because the append-only
file is written before each answer.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import redis

from nouscoder.broker.redis_server import RedisServer, start_redis


class ForgetfulRedis:
    """Its append-only file is in `folder`. `environment` extends that of this process.

    Raises RedisServerError when this machine has no Redis.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._environment = environment
        self._copy = folder.with_name(folder.name + ".copy")
        self._server = self._start()
        self.url = self._server.url

    def remember(self) -> None:
        """What it holds now is what it goes back to."""
        shutil.rmtree(self._copy, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.sock", "*.log")
        shutil.copytree(self._folder, self._copy, ignore=ignored, symlinks=True)

    def roll_back(self) -> None:
        """Dies, and comes back as it was when `remember` was called: all later writes are lost."""
        self.die()
        shutil.rmtree(self._folder)
        shutil.copytree(self._copy, self._folder, symlinks=True)
        self.come_back()

    def wipe(self) -> None:
        """Loses everything."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def fill(self) -> None:
        """Has no memory left until `empty`."""
        with redis.Redis.from_url(self.url) as client:
            client.config_set("maxmemory", 1)

    def empty(self) -> None:
        """Has memory again."""
        with redis.Redis.from_url(self.url) as client:
            client.config_set("maxmemory", 0)

    def stop(self) -> None:
        """Stands still until `go_on`."""
        self._server.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Goes on where it stood still."""
        self._server.signal(signal.SIGCONT)

    def die(self) -> None:
        """Is killed, and gone until `come_back`."""
        self._server.kill()

    def come_back(self) -> None:
        """Starts again with what it held."""
        self._server = self._start()

    def close(self) -> None:
        """Ends."""
        self._server.close()

    def _start(self) -> RedisServer:
        server = start_redis(self._folder, environment=self._environment)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("appendfsync", "always")
            client.config_set("auto-aof-rewrite-percentage", 0)  # a rewrite would change files while they are copied
        return server
