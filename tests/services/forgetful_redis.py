"""A Redis of a test's own that forgets: it goes back to what it held a moment ago, or is wiped."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import redis

from nouscoder.broker.redis_server import RedisServer, start_redis


class ForgetfulRedis:
    """`folder` holds its append-only file. Each acknowledged write is in it, so that a copy is of one instant."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copy = folder.with_name(folder.name + ".copy")
        self._server = self._start()
        self.url = self._server.url

    def remember(self) -> None:
        """What it holds now is what it goes back to."""
        shutil.rmtree(self._copy, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.sock", "*.log")
        shutil.copytree(self._folder, self._copy, ignore=ignored)

    def roll_back(self) -> None:
        """Dies, and comes back as it was when `remember` was called: all later writes are lost."""
        self._kill()
        shutil.rmtree(self._folder)
        shutil.copytree(self._copy, self._folder)
        self._server = self._start()

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
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Goes on where it stood still."""
        self._signal(signal.SIGCONT)

    def die(self) -> None:
        """Is killed, and gone until `come_back`."""
        self._kill()

    def come_back(self) -> None:
        """Starts again with what it held."""
        self._server = self._start()

    def close(self) -> None:
        """Ends."""
        self._server.close()

    def _start(self) -> RedisServer:
        server = start_redis(self._folder)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("appendfsync", "always")
        return server

    def _signal(self, number: signal.Signals) -> None:
        assert self._server.pid is not None
        os.kill(self._server.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._server._process is not None
        self._server._process.wait()
