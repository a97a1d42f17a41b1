"""The agent: accepts a gateway, starts a harness for it, waits until either ends, and cleans up.

INVARIANT: when the connection of a slot ends, every other process of the container is dead before the next slot starts,
or this process exits and the container ends. The key of the pool is in no environment that others can read in /proc.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from typing import Any

try:
    from . import handshake
    from .kernel import kernel_facts, mapped_users
    from .relay import Relay
except ImportError:  # in the image, where this folder is not a package
    import handshake  # type: ignore[no-redef, import-not-found]
    from kernel import kernel_facts, mapped_users  # type: ignore[no-redef, import-not-found]
    from relay import Relay  # type: ignore[no-redef, import-not-found]

HOME = "/opt/nouscoder"
END_LIMIT_S = 5.0
_KEY, _KEY_FD = "NOUSCODER_RUNNER_KEY", "NOUSCODER_RUNNER_KEY_FD"
_MAX_HANDSHAKES = 16  # handshakes at once; a further connection ends the oldest one
_KERNELS = ("gvisor", "linux")  # of the container: the sentry, or that of a node or of a virtual machine
_ROLES = (handshake.SLOT, *handshake.PARTNERS)
_FIRST_UID, _UIDS_AN_AGENT = 1_000_000_000, 2 * len(_ROLES)  # two for each harness
_POLL_INTERVAL_MS = 500
_KEEPALIVE_S = 10  # a gateway whose node vanishes does not close its connection

# What a probe leaves that connects and closes. In TLS the error depends on the kernel: SSLZeroReturnError in gVisor.
_CLOSED_EARLY = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)

Tls = tuple[ssl.SSLContext, bytes]  # of this container's certificate, and the certificate's digest


class RunnerAgent:
    """The agent of one container."""

    def __init__(
        self, key: bytes, home: str, kernel: str, idle_s: float, tls: Tls | None, *, waits: bool = False
    ) -> None:
        """`idle_s` seconds without a gateway end the process; 0: they do not. If it `waits`, the first may come later.

        Raises HandshakeError, unknown kernel.

        Without `tls` it expects a tunnel in front of it. The kernel is asked here, before anybody else runs.
        """
        if kernel not in _KERNELS:
            raise handshake.HandshakeError(f"{kernel!r} is not a kernel")
        self._kernel_facts = kernel_facts()
        self._tls = tls
        self._key = key
        self._idle_s = idle_s
        # When a gateway has last proved that it has the key, or closed a slot.
        self._heard_s = math.inf if waits else time.monotonic()
        self._home = home
        self._kernel = kernel
        self._lock = threading.Lock()
        self._in_use: dict[str, subprocess.Popen[bytes] | None] = {}  # by role; None while the harness starts
        self._dialogue_ends: tuple[socket.socket, ...] = ()  # connect the harness of the slot with that of its partner
        self._handshakes: dict[socket.socket, None] = {}  # connections without a proof of the key, oldest first

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until the process is killed or has been idle for too long."""
        if self._idle_s:
            threading.Thread(target=self._end_when_idle, daemon=True).start()
        while True:
            connection, _ = listener.accept()
            if self._tls is not None:
                try:
                    connection = self._tls[0].wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                except OSError:
                    connection.close()  # a probe that has already closed it
                    continue
            with self._lock:
                self._handshakes[connection] = None
                if len(self._handshakes) > _MAX_HANDSHAKES:
                    oldest = next(iter(self._handshakes))
                    with contextlib.suppress(OSError):  # TLS' own shutdown may run in another thread meanwhile
                        socket.socket.shutdown(oldest, socket.SHUT_RDWR)
                    del self._handshakes[oldest]
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        """Serve one connection, from the handshake to the end of its harness."""
        with connection:
            try:
                try:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    with contextlib.suppress(OSError):
                        handshake.watch_peer(connection, _KEEPALIVE_S)
                    request, nonces = self._receive_request(connection)
                    about = _about(request) | {"kernel": self._kernel_facts}
                    role = self._reserve(request)
                    about["peer"] = role != handshake.CHECKER
                    text = handshake.pack({"status": handshake.OK if role else handshake.BUSY, **about})
                    proof = handshake.proof(self._key, "runner", nonces, text)
                    connection.sendall(proof + handshake.LENGTH.pack(len(text)) + text)
                finally:
                    with self._lock:
                        self._handshakes.pop(connection, None)
                if role == handshake.RETIRE:
                    os._exit(0)
                if role:
                    self._run(connection, role, request)
            except (OSError, handshake.HandshakeError) as error:
                if not isinstance(error, _CLOSED_EARLY):
                    log(f"a connection was refused: {error!r}")

    def _end_when_idle(self) -> None:
        while True:
            with self._lock:
                left_s = self._idle_s if self._in_use else self._heard_s + self._idle_s - time.monotonic()
                if left_s <= 0:
                    log(f"no gateway has come for {self._idle_s:.0f} s: the container ends")
                    os._exit(0)
            time.sleep(min(left_s, self._idle_s))

    def _receive_request(self, connection: socket.socket) -> tuple[dict[str, Any], handshake.Nonces]:
        ours, end_s = os.urandom(handshake.NONCE_BYTES), time.monotonic() + handshake.LIMIT_S
        connection.settimeout(handshake.LIMIT_S)
        if isinstance(connection, ssl.SSLSocket):
            connection.do_handshake()
        connection.sendall(handshake.MAGIC + ours)
        theirs = _exactly(connection, handshake.NONCE_BYTES, end_s)
        proof = _exactly(connection, handshake.PROOF_BYTES, end_s)
        length = handshake.message_length(_exactly(connection, handshake.LENGTH.size, end_s))
        text = _exactly(connection, length, end_s)
        nonces = handshake.Nonces(ours, theirs, self._tls[1] if self._tls is not None else b"")
        handshake.check_proof(proof, self._key, "gateway", nonces, text)
        self._heard_s = time.monotonic()
        return handshake.unpack(text), nonces

    def _reserve(self, request: dict[str, Any]) -> str:
        """Reserve the requested role. Returns "" when it is in use. Raises HandshakeError for an unknown role."""
        role = str(request.get("want"))
        if role == handshake.RETIRE:
            return role
        if role not in _ROLES:
            raise handshake.HandshakeError(f"{role!r} is not a role")
        with self._lock:
            without_slot = role != handshake.SLOT and handshake.SLOT not in self._in_use
            if role in self._in_use or without_slot:
                return ""
            self._in_use[role] = None
            if role == handshake.SLOT:
                self._dialogue_ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return role

    def _run(self, connection: socket.socket, role: str, request: dict[str, Any]) -> None:
        """Run a harness on this connection until either ends, then kill all its processes."""
        try:
            connection.settimeout(None)
            ours, theirs = (connection, None) if self._tls is None else socket.socketpair()
            stream = theirs or connection
            ends = [end.fileno() for each, end in zip(_ROLES, self._dialogue_ends, strict=False) if each == role]
            harness = subprocess.Popen(
                self._command(request, role, *ends),
                stdin=stream.fileno(),
                stdout=stream.fileno(),
                env=request["environment"],
                cwd="/",
                start_new_session=True,
                pass_fds=ends,
            )
            with self._lock:
                self._in_use[role] = harness
            if theirs is None:
                _await_end(harness, connection)
            else:
                theirs.close()
                _relay_until_end(harness, connection, ours)
            harness.kill()
            harness.wait(END_LIMIT_S)
        except (OSError, subprocess.SubprocessError, KeyError, TypeError, ValueError) as error:
            log(f"a {role} could not be served: {error!r}")
        self._free(role)

    def _command(self, request: dict[str, Any], role: str, peer: int = -1) -> list[str]:
        settings = request["settings"]
        packages, init_folder = f"{self._home}/site-packages", f"{self._home}/init"
        (library,) = os.listdir(init_folder)
        ours: dict[str, Any] = {"kernel": self._kernel, "init_library": f"{init_folder}/{library}", "peer": peer}
        if os.path.isdir(packages):
            ours["site_packages"] = [packages]
        if self._kernel == "linux" and os.geteuid() == 0:
            first = _first_uid() + 2 * _ROLES.index(role)
            ours |= {"uid_init": first, "uid_candidate": first + 1}
        entry = f"{self._home}/harness/__main__.py"
        return [sys.executable, "-I", "-S", "-X", "utf8", entry, json.dumps({**settings, **ours})]

    def _free(self, role: str) -> None:
        """Release a role. The end of a slot also ends its partners, so that no process of any is left."""
        with self._lock:
            partners = [partner for each in handshake.PARTNERS if (partner := self._in_use.get(each))]
        if role == handshake.SLOT:
            for partner in partners:
                partner.kill()
            kill_all()
            for end in self._dialogue_ends:
                end.close()
        with self._lock:
            self._heard_s = time.monotonic()
            self._in_use.pop(role, None)


def _first_uid() -> int:
    """The first of this agent's users: mapped in its user namespace, and no other agent's."""
    (_, _, num_users), *_ = mapped_users()
    if num_users > _FIRST_UID:  # the host's own users, which agents on one machine share
        return _FIRST_UID + os.getpid() % 65536 * _UIDS_AN_AGENT
    return num_users - _UIDS_AN_AGENT


def _await_end(harness: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Wait until the harness has ended or the gateway has closed the connection. Reads nothing from it."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    while harness.poll() is None:
        if poll.poll(_POLL_INTERVAL_MS) or _is_closed(connection):
            return


def _relay_until_end(harness: subprocess.Popen[bytes], connection: socket.socket, ours: socket.socket) -> None:
    """The same for an encrypted connection, whose bytes are copied meanwhile."""
    assert isinstance(connection, ssl.SSLSocket)
    with ours, contextlib.suppress(OSError):
        relay = Relay(connection, ours)
        relay.run(lambda: _is_closed(connection), lambda: harness.poll() is not None, _POLL_INTERVAL_MS)


def _is_closed(connection: socket.socket) -> bool:
    """Whether the TCP state is closed. Some kernels do not report to poll that a peer closed while data is unread."""
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state not in (1, 0)  # 1 is ESTABLISHED, 0 is reported by kernels without TCP_INFO


def _about(request: dict[str, Any]) -> dict[str, Any]:
    """The Python version, and the paths of those of the requested tools that exist here. Raises HandshakeError."""
    try:
        found = {tool: shutil.which(tool, path=request.get("search_path")) for tool in request.get("tools", ())}
    except (TypeError, ValueError) as error:
        raise handshake.HandshakeError(f"a request with invalid tools: {error!r}") from error
    return {"python": sys.version.split()[0], "tools": {tool: path for tool, path in found.items() if path}}


def _exactly(connection: socket.socket, num_bytes: int, end_s: float) -> bytes:
    """Receive until the time `end_s`, however slowly the bytes arrive. Raises OSError."""
    data = b""
    while len(data) < num_bytes:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(left_s)
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        data += part
    return data


def kill_all() -> None:
    """Kill every other process and wait for their end. Exits, which ends the container, when they do not end."""
    end = time.monotonic() + END_LIMIT_S
    while time.monotonic() < end:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        reap()
        if not _other_processes():
            return
        time.sleep(0.01)
    log("processes of a submission do not end: the container exits")
    os._exit(1)


def reap() -> None:
    """Wait for ended children. Orphans are children of process 1, which is this process."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _other_processes() -> list[str]:
    """The pids of the other processes of this container; none if it has no separate pid namespace."""
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != "1"] if os.getpid() == 1 else []


def log(text: str) -> None:
    """Write a line to the log of the container."""
    sys.stderr.write(f"runner: {text}\n")
    sys.stderr.flush()


def _restart_without_key(text: str) -> None:
    """Exec this program again with the key in a pipe, because the kernel shows the environment of the first exec."""
    handshake.read_key(text)
    read_end, write_end = os.pipe()
    os.write(write_end, text.encode()[: select.PIPE_BUF])
    os.close(write_end)
    os.set_inheritable(read_end, True)
    os.environ[_KEY_FD] = str(read_end)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _received_key() -> bytes:
    fd = int(os.environ.pop(_KEY_FD, "-1"))
    if fd < 0:
        raise handshake.HandshakeError(f"{_KEY} is not set")
    with open(fd, encoding="utf8") as pipe:
        return handshake.read_key(pipe.read())


def _certificate() -> Tls:
    try:
        return handshake.own_certificate()
    except handshake.NoCertificate as error:
        log(str(error))
        sys.exit(1)


def main() -> None:
    """Serve until killed or idle. The key is not in the environment of this process, which others can read in /proc."""
    if _KEY in os.environ:
        _restart_without_key(os.environ.pop(_KEY))
    key = _received_key()
    port = int(os.environ.pop("NOUSCODER_RUNNER_PORT", str(handshake.DEFAULT_PORT)))
    home = os.environ.pop("NOUSCODER_RUNNER_HOME", HOME)
    idle_s = float(os.environ.pop("NOUSCODER_RUNNER_IDLE_S", "0"))
    kernel = os.environ.pop("NOUSCODER_RUNNER_KERNEL", "gvisor")
    has_tunnel = os.environ.pop("NOUSCODER_RUNNER_TLS", "own") == "tunnel"
    waits = os.environ.pop("NOUSCODER_RUNNER_WAITS", "") == "1"
    agent = RunnerAgent(key, home, kernel, idle_s, None if has_tunnel else _certificate(), waits=waits)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    reap()
    dual = socket.has_dualstack_ipv6()  # the gateway may come by either family
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", port), family=family, backlog=64, dualstack_ipv6=dual) as listener:
        log(f"listening on port {port}")
        agent.serve(listener)
