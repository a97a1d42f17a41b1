"""A real Redis that loses its last writes or all of them, has no memory, stops or dies on request; and its clock.

INVARIANT: a copy that `remember` makes holds every write that Redis acknowledged before it, because the append-only
file is written before each answer. A step of the clock takes effect at once, and monotonic clocks never step.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import redis

from nouscoder.bench.measuring import BenchError
from nouscoder.broker.redis_server import RedisServer, start_redis
from nouscoder.verifier.sandbox.init_build import NotCompiled, compile_c

_SOURCE = Path(__file__).with_name("stepped_clock.c")
_FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC")


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


class SteppedClock:
    """A wall clock for the processes that are started with `environment`, which can be set forwards and back.

    A small library (stepped_clock.c) is preloaded into them. It adds the seconds of a file to the wall clock. The files
    are in `folder`. Raises BenchError when this machine has no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "step"
        self._step_s = 0
        self.step(0.0)
        library = folder / "stepped_clock.so"
        try:
            compile_c([*_FLAGS, "-o", str(library), str(_SOURCE)], _SOURCE.name)
        except NotCompiled as error:
            raise BenchError(f"Redis' clock cannot be set: {error}") from error
        self.environment = {"LD_PRELOAD": str(library), "NOUSCODER_CLOCK_STEP_FILE": str(self._file)}

    def step(self, seconds: float) -> None:
        """Set the clock forwards, or back, by whole seconds."""
        self._step_s += round(seconds)
        # Overwritten in place, because processes have mapped the file: eight bytes are written at once.
        with self._file.open("r+b" if self._file.exists() else "wb", buffering=0) as file:
            file.write(self._step_s.to_bytes(8, "little", signed=True))
