"""A link to the harness in a runner pod: TCP, after a greeting in which both sides prove that they have the pool's key.

The connection is the harness's own stdin and stdout: no process stands in between. It is not encrypted: what crosses it
are programs and inputs of tests, never an expected output, and network policies let nobody else near it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nouscoder.verifier.runner import greeting
from nouscoder.verifier.sandbox.base import SandboxError
from nouscoder.verifier.sandbox.link import MAX_READ_AHEAD_BYTES, Ending

_BUSY_LIMIT_S = 10.0  # a runner that was just given back still cleans up
_BUSY_PAUSE_S = 0.05
_DEAD_AFTER_MS = 8000  # without an acknowledgement: a pod that vanished sends no farewell
_KEEPALIVE_S = 2


class RunnerRefused(SandboxError):
    """Who answers there is no runner of this pool, or does not take us."""


class RunnerBusy(RunnerRefused):
    """Somebody else uses it."""


@dataclass(frozen=True, slots=True)
class RunnerAbout:
    """What a runner says of itself: its python, and the tools that candidates find there, by name."""

    python: str
    tools: Mapping[str, str]


class SocketLink:
    """See `Link`."""

    pid = None

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        about: RunnerAbout,
        name: str,
        closed: Callable[[Ending], Awaitable[None]] | None = None,
    ) -> None:
        self.reader, self.writer, self.about = reader, writer, about
        self._name = name
        self._closed = closed

    @property
    def is_open(self) -> bool:
        """See `Link`: nobody has hung up, as far as TCP has told."""
        return not (self.writer.is_closing() or self.reader.at_eof())

    def last_words(self) -> str:
        """See `Link`."""
        return f"Its log is that of runner {self._name}"

    async def close(self, ending: Ending) -> None:
        """Hang up, at which the runner kills all that serves this connection."""
        self.writer.transport.abort()
        if self._closed is not None:
            await self._closed(ending)


async def connect(
    address: tuple[str, int],
    key: bytes,
    want: str,
    settings: Mapping[str, Any],
    *,
    name: str,
    limit_s: float,
    closed: Callable[[Ending], Awaitable[None]] | None = None,
) -> SocketLink:
    """A link to a fresh harness of the runner at `address`; one that is busy for a moment is asked again.

    Raises OSError when nobody answers, RunnerBusy, and RunnerRefused.
    """
    end = asyncio.get_running_loop().time() + _BUSY_LIMIT_S
    while True:
        try:
            async with asyncio.timeout(limit_s):
                return await _connect(address, key, want, settings, name, closed)
        except RunnerBusy:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(_BUSY_PAUSE_S)


async def _connect(
    address: tuple[str, int],
    key: bytes,
    want: str,
    settings: Mapping[str, Any],
    name: str,
    closed: Callable[[Ending], Awaitable[None]] | None,
) -> SocketLink:
    reader, writer = await asyncio.open_connection(*address, limit=MAX_READ_AHEAD_BYTES)
    try:
        _watch_peer(writer.get_extra_info("socket"))
        answer = await _greet(reader, writer, key, {"want": want, "settings": dict(settings)})
        if answer.get("status") != greeting.OK:
            raise RunnerBusy(f"runner {name} is busy")
    except asyncio.IncompleteReadError as error:
        writer.transport.abort()
        raise RunnerRefused(f"runner {name} hung up during the greeting: is its key another?") from error
    except greeting.GreetingError as error:
        writer.transport.abort()
        raise RunnerRefused(f"runner {name}: {error}") from error
    except BaseException:
        writer.transport.abort()
        raise
    about = RunnerAbout(str(answer.get("python", "")), dict(answer.get("tools", {})))
    return SocketLink(reader, writer, about, name, closed)


async def _greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, request: dict[str, Any]
) -> dict[str, Any]:
    if await reader.readexactly(len(greeting.MAGIC)) != greeting.MAGIC:
        raise greeting.GreetingError("who answers is no runner")
    theirs, ours = await reader.readexactly(greeting.NONCE_BYTES), os.urandom(greeting.NONCE_BYTES)
    text = greeting.pack(request)
    proof = greeting.proof(key, "gateway", theirs, ours, text)
    writer.write(ours + proof + greeting.LENGTH.pack(len(text)) + text)
    given = await reader.readexactly(greeting.PROOF_BYTES)
    answer = await reader.readexactly(greeting.message_length(await reader.readexactly(greeting.LENGTH.size)))
    greeting.check_proof(given, key, "runner", theirs, ours, answer)
    return greeting.unpack(answer)


def _watch_peer(connection: socket.socket) -> None:
    """Have the kernel give up a peer that is gone without a word within seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _KEEPALIVE_S), ("TCP_KEEPINTVL", _KEEPALIVE_S), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MS)
