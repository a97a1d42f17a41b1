"""The link to the harness in a runner: TCP, after a handshake in which both sides prove that they have the pool's key.

The connection is the stdin and stdout of the harness. It carries programs and test inputs, never an expected output.
It is TLS with the runner's own certificate, to which both proofs are bound. To a container of Modal it is TLS with
Modal's certificate, which is checked in the usual way.

INVARIANT: a changed file of the key loses no runner. One that was made with an earlier key stays usable until it is
replaced, which the sandbox does between two submissions. An unreadable file changes nothing.

A runner has the key of its start. The Secrets of the two namespaces change at different moments, and the kubelet
updates the gateway's file up to a minute later, so both orders occur: runners with a key that is not yet in the file
are made again (`pool.py`), and a runner counts as outdated only after `_SETTLE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from nouscoder.verifier.runner import handshake
from nouscoder.verifier.runner.handshake import any_certificate, digest_of
from nouscoder.verifier.sandbox.base import SandboxError, SandboxUnavailable
from nouscoder.verifier.sandbox.slot import MAX_READ_AHEAD_BYTES, Link
from nouscoder.verifier.toolchains.languages import known_tools

log = logging.getLogger(__name__)

_SETTLE_S = 30.0  # after a change, and after a runner was first reached
_MAX_KEYS = 3
_BUSY_LIMIT_S = 10.0  # a runner that was just released still cleans up
_BUSY_PAUSE_S = 0.05
_DEAD_AFTER_MS = 8000  # without an acknowledgement, because a pod that vanishes does not close its connection
_KEEPALIVE_S = 2
_OWN_CERTIFICATES = any_certificate()


class PoolKeys:
    """The keys of one pool, the newest first: that of the file now, and those before it while runners have them."""

    def __init__(self, key: bytes, path: Path | None = None) -> None:
        """Without `path` the key never changes."""
        self._keys: tuple[bytes, ...] = (key,)
        self._path = path
        self._changed_s = time.monotonic()
        self._answered: dict[str, tuple[bytes, float]] = {}  # by runner: the key that it has, since when this is known
        self._problem = ""

    @staticmethod
    def of_file(path: Path) -> PoolKeys:
        """Raises SandboxUnavailable."""
        try:
            return PoolKeys(_read(path), path)
        except (OSError, ValueError, handshake.HandshakeError) as error:
            raise SandboxUnavailable(f"verifier.sandbox.pool_key_file: {path} cannot be used: {error}") from error

    def of(self, runner: str) -> tuple[bytes, ...]:
        """The keys to try with a runner, the most probable first."""
        known = self._answered.get(runner)
        return self._keys if known is None else (known[0], *(key for key in self._keys if key != known[0]))

    def answered(self, runner: str, key: bytes) -> None:
        """Note that a runner has proved this key."""
        if (known := self._answered.get(runner)) is None or known[0] != key:
            self._answered[runner] = (key, time.monotonic())

    def forget_all_but(self, runners: frozenset[str]) -> None:
        """Forget what is known of runners that are gone."""
        self._answered = {name: known for name, known in self._answered.items() if name in runners}

    def is_outdated(self, runner: str) -> bool:
        """Whether a runner has an earlier key, and had time to get the newest."""
        known = self._answered.get(runner)
        if known is None or known[0] == self._keys[0]:
            return False
        return time.monotonic() - max(known[1], self._changed_s) >= _SETTLE_S

    def reload(self) -> bool:
        """Read the file again. Returns whether it holds another key."""
        if self._path is None:
            return False
        try:
            key = _read(self._path)
        except (OSError, ValueError, handshake.HandshakeError) as error:
            if self._problem != str(error):
                log.error("the pool's key cannot be read again: the old one stays", extra={"detail": str(error)})
            self._problem = str(error)
            return False
        self._problem = ""
        if key == self._keys[0]:
            return False
        self._keys = (key, *(old for old in self._keys if old != key))[:_MAX_KEYS]
        self._changed_s = time.monotonic()
        log.info("the pool has a new key: runners with the old one are replaced")
        return True


def _read(path: Path) -> bytes:
    return handshake.read_key(path.read_text(encoding="utf-8-sig"))


class RunnerRefused(SandboxError):
    """The peer is not a runner of this pool, or it refuses the connection."""


class RunnerBusy(RunnerRefused):
    """Another connection uses the runner."""


class OtherKey(RunnerRefused):
    """The runner ended the handshake: it does not accept the proof of this key."""


class KernelUnproven(RunnerRefused):
    """What the runner says of its kernel does not show the isolation of the backend."""


class SocketLink(Link):
    """The link to a harness in a runner pod, which has said `about` of itself. `closed` learns `worn`."""

    tools: Mapping[str, str]

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, about: Mapping[str, Any], name: str
    ) -> None:
        self.reader, self.writer = reader, writer
        self.tools, self.has_dialogue_socket = known_tools(about.get("tools")), about.get("peer") is True
        self.kernel: object = about.get("kernel")  # what it says of its kernel (runner/kernel.py)
        self.closed: Callable[[bool], Awaitable[None]] | None = None
        self._name = name

    @property
    def is_open(self) -> bool:
        """See `Link`: neither side has closed the connection, as far as TCP has reported."""
        return not (self.writer.is_closing() or self.reader.at_eof())

    def last_log_line(self) -> str:
        """See `Link`."""
        return f"See the log of runner {self._name}"

    async def close(self, *, worn: bool = False) -> None:
        """Abort the connection. The runner then kills every process that serves it."""
        self.writer.transport.abort()
        if self.closed is not None:
            await self.closed(worn)


async def connect(
    address: tuple[str, int],
    key: bytes,
    want: str,
    request: Mapping[str, Any],
    *,
    name: str,
    limit_s: float,
    tls: ssl.SSLContext | None = None,
) -> SocketLink:
    """A link to a fresh harness of the runner at `address`. A busy runner is retried for up to 10 s.

    `request` is the rest of the handshake's request (handshake.py). With `tls` a tunnel before the runner must have
    the certificate of the address's host; without, the runner must prove that the certificate is its own. Raises
    OSError without an answer, RunnerBusy, OtherKey, and RunnerRefused.
    """
    end = asyncio.get_running_loop().time() + _BUSY_LIMIT_S
    while True:
        try:
            async with asyncio.timeout(limit_s):
                host = address[0] if tls is not None else ""
                context = tls or _OWN_CERTIFICATES
                streams = await asyncio.open_connection(
                    *address, limit=MAX_READ_AHEAD_BYTES, ssl=context, server_hostname=host
                )
                certificate = b""
                if tls is None:
                    certificate = digest_of(streams[1].get_extra_info("ssl_object").getpeercert(binary_form=True))
                about = await _shaken_hands(*streams, key, certificate, {"want": want, **request}, name)
                return SocketLink(*streams, about, name)
        except ssl.SSLError as error:
            raise RunnerRefused(f"runner {name} does not speak TLS as a runner does: {error}") from error
        except RunnerBusy:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(_BUSY_PAUSE_S)


async def connect_by_any(
    address: tuple[str, int], keys: PoolKeys, want: str, request: Mapping[str, Any], *, name: str, **more: Any
) -> SocketLink:
    """`connect` with the key that the runner has, which is noted. Raises the same."""
    *earlier, last = keys.of(name)
    for key in (*earlier, last):
        try:
            link = await connect(address, key, want, request, name=name, **more)
        except OtherKey:
            if key is last:
                raise
        else:
            keys.answered(name, key)
            return link
    raise AssertionError


async def _shaken_hands(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    key: bytes,
    certificate: bytes,
    request: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    """What the runner says of itself. Aborts the connection and raises when it refuses, or is none of this pool."""
    try:
        # The kernel closes the connection within seconds when the peer vanishes.
        connection = writer.get_extra_info("socket")
        handshake.watch_peer(connection, _KEEPALIVE_S)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MS)
        answer = await _shake_hands(reader, writer, key, certificate, request)
        if answer.get("status") != handshake.OK:
            raise RunnerBusy(f"runner {name} is busy")
        return answer
    except asyncio.IncompleteReadError as error:
        writer.transport.abort()
        raise OtherKey(f"runner {name} closed the connection: does it have another key?") from error
    except handshake.HandshakeError as error:
        writer.transport.abort()
        raise RunnerRefused(f"runner {name}: {error}") from error
    except BaseException:
        writer.transport.abort()
        raise


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, certificate: bytes, request: dict[str, Any]
) -> dict[str, Any]:
    if await reader.readexactly(len(handshake.MAGIC)) != handshake.MAGIC:
        raise handshake.HandshakeError("the peer is not a runner")
    theirs, ours = await reader.readexactly(handshake.NONCE_BYTES), os.urandom(handshake.NONCE_BYTES)
    text = handshake.pack(request)
    nonces = handshake.Nonces(theirs, ours, certificate)
    proof = handshake.proof(key, "gateway", nonces, text)
    writer.write(ours + proof + handshake.LENGTH.pack(len(text)) + text)
    runner_proof = await reader.readexactly(handshake.PROOF_BYTES)
    answer = await reader.readexactly(handshake.message_length(await reader.readexactly(handshake.LENGTH.size)))
    handshake.check_proof(runner_proof, key, "runner", nonces, answer)
    return handshake.unpack(answer)
