"""The agent's work: accept, greet, start a harness, wait for its end or the gateway's, clean up."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

try:
    from . import greeting
except ImportError:  # in the image, where this folder is no package
    import greeting  # type: ignore[no-redef, import-not-found]

_HOME = "/opt/nouscoder"
_MAX_GREETINGS = 16  # at once; more are closed unheard
_END_LIMIT_S = 5.0
_LOOK_EVERY_MS = 500
_SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/go/bin:/usr/lib/go/bin"
# MALLOC_ARENA_MAX keeps threads from reserving 64 MiB of address space each, which RLIMIT_AS would count.
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"}


class Agent:
    """One a container."""

    def __init__(self, key: bytes, home: str = _HOME) -> None:
        self._key = key
        self._home = home
        self._lock = threading.Lock()
        self._in_use: dict[str, subprocess.Popen[bytes] | None] = {}  # by role; None while it is being started
        self._greetings = threading.Semaphore(_MAX_GREETINGS)

    def serve(self, listener: socket.socket) -> None:
        """Accept for ever."""
        while True:
            connection, _ = listener.accept()
            if not self._greetings.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        """A whole connection, from the greeting to the end of what it asked for."""
        with connection:
            try:
                try:
                    connection.settimeout(greeting.LIMIT_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    wanted, nonces = self._hear(connection)
                    role = self._take(wanted)
                    self._answer(connection, nonces, {"status": greeting.OK if role else greeting.BUSY, **_about()})
                finally:
                    self._greetings.release()
                if role == greeting.RETIRE:
                    os._exit(0)
                if role:
                    self._run(connection, role, wanted)
            except (OSError, greeting.GreetingError) as error:
                if not isinstance(error, ConnectionError):  # those are probes
                    _say(f"a caller was turned away: {error!r}")

    def _hear(self, connection: socket.socket) -> tuple[dict[str, Any], tuple[bytes, bytes]]:
        ours = os.urandom(greeting.NONCE_BYTES)
        connection.sendall(greeting.MAGIC + ours)
        theirs = _exactly(connection, greeting.NONCE_BYTES)
        given = _exactly(connection, greeting.PROOF_BYTES)
        text = _exactly(connection, greeting.message_length(_exactly(connection, greeting.LENGTH.size)))
        greeting.check_proof(given, self._key, "gateway", ours, theirs, text)
        return greeting.unpack(text), (ours, theirs)

    def _answer(self, connection: socket.socket, nonces: tuple[bytes, bytes], answer: dict[str, Any]) -> None:
        text = greeting.pack(answer)
        proof = greeting.proof(self._key, "runner", *nonces, text)
        connection.sendall(proof + greeting.LENGTH.pack(len(text)) + text)

    def _take(self, wanted: dict[str, Any]) -> str:
        """Reserve the role that is wanted; "" when it is in use. Raises GreetingError for one that is none."""
        role = str(wanted.get("want"))
        if role == greeting.RETIRE:
            return role
        if role not in (greeting.SLOT, greeting.PARTNER):
            raise greeting.GreetingError(f"{role!r} is nothing to want")
        with self._lock:
            alone = role == greeting.PARTNER and greeting.SLOT not in self._in_use
            if role in self._in_use or alone:
                return ""
            self._in_use[role] = None
        return role

    def _run(self, connection: socket.socket, role: str, wanted: dict[str, Any]) -> None:
        """A harness on this connection, until either ends; then nothing of it is left."""
        try:
            connection.settimeout(None)
            stream = connection.fileno()
            harness = subprocess.Popen(
                self._command(wanted), stdin=stream, stdout=stream, env=_ENVIRONMENT, cwd="/", start_new_session=True
            )
            with self._lock:
                self._in_use[role] = harness
            _await_end(harness, connection)
            harness.kill()
            harness.wait(_END_LIMIT_S)
        except (OSError, subprocess.SubprocessError, TypeError, ValueError) as error:
            _say(f"a {role} could not be served: {error!r}")
        self._free(role)

    def _command(self, wanted: dict[str, Any]) -> list[str]:
        settings = wanted.get("settings")
        if not isinstance(settings, dict):
            raise ValueError("no settings were given")
        packages, init_folder = f"{self._home}/site-packages", f"{self._home}/init"
        (library,) = os.listdir(init_folder)
        ours = {"kernel": "gvisor", "init_library": f"{init_folder}/{library}"}
        if os.path.isdir(packages):
            ours["site_packages"] = [packages]  # type: ignore[assignment]
        entry = f"{self._home}/harness/__main__.py"
        return [sys.executable, "-I", "-S", "-X", "utf8", entry, json.dumps({**settings, **ours})]

    def _free(self, role: str) -> None:
        """A slot takes its partner with it: only then is it known that nothing of anybody is left."""
        with self._lock:
            partner = self._in_use.get(greeting.PARTNER)
        if role == greeting.SLOT:
            if partner is not None:
                partner.kill()
            _end_everybody()
        with self._lock:
            self._in_use.pop(role, None)


def _await_end(harness: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Until the harness has ended or the gateway is gone; what it still sends is the harness's to read."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    while harness.poll() is None:
        if poll.poll(_LOOK_EVERY_MS) or _is_over(connection):
            return


def _is_over(connection: socket.socket) -> bool:
    """Whether TCP says so: not every kernel tells poll of a peer that has closed while its data is unread."""
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state not in (1, 0)  # ESTABLISHED; 0 where it is not told


def _end_everybody() -> None:
    """Kill every process but this one and wait for their end; ends this process, and the container, when it cannot."""
    end = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < end:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        _reap()
        if not _others():
            return
        time.sleep(0.01)
    _say("processes of a submission do not die: the container ends")
    os._exit(1)


def _reap() -> None:
    """Orphans are re-parented to process 1, that is to us."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _others() -> list[str]:
    """Processes of this container beside this one, where it has a pid namespace of its own."""
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != "1"] if os.getpid() == 1 else []


def _about() -> dict[str, Any]:
    """What candidates find here."""
    tools = ("gcc", "g++", "pypy3", "javac", "java", "node", "go", "rustc")
    found = {tool: shutil.which(tool, path=_SEARCH_PATH) for tool in tools}
    return {"python": sys.version.split()[0], "tools": {tool: path for tool, path in found.items() if path}}


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("the caller hung up")
        data += part
    return data


def _say(text: str) -> None:
    sys.stderr.write(f"runner: {text}\n")
    sys.stderr.flush()


def main() -> None:
    """Serve until killed. The key goes out of the environment at once."""
    key = greeting.read_key(os.environ.pop("NOUSCODER_RUNNER_KEY", ""))
    port = int(os.environ.pop("NOUSCODER_RUNNER_PORT", str(greeting.DEFAULT_PORT)))
    home = os.environ.pop("NOUSCODER_RUNNER_HOME", _HOME)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _reap()
    with socket.create_server(("0.0.0.0", port), backlog=64) as listener:
        _say(f"listening on port {port}")
        Agent(key, home).serve(listener)
