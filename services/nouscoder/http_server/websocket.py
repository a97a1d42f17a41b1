"""WebSocket connections: uvicorn's, with bounds on what a client can make the process hold.

INVARIANT: what all connections have received and the application has not taken yet is at most MAX_HELD_BYTES together,
and one packet. One message has at most MAX_MESSAGE_BYTES (listener.py) in MAX_FRAMES frames, and in a
second come at most MAX_PINGS pings or MAX_MESSAGES messages. A connection that would
exceed a bound is ended. From a client that does not take what it is sent nothing is read, and it is ended after
ANSWER_PATIENCE_S.

Messages are not compressed, because a small one may become a thousand times as large. The server sends no pings: the
program of a client that is busy does not answer them. TCP finds the clients that are gone.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from nouscoder.http_server.delivery import ANSWER_PATIENCE_S

MAX_FRAMES = 1024
MAX_PINGS, MAX_MESSAGES = 100, 200  # in a second
_PIECE_BYTES = 4096  # that are parsed before the bounds are looked at
MAX_HELD_BYTES = 64 * 1024**2
_FRAME_BYTES = 256  # what the objects of a frame or a message take beside its bytes
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 60, "TCP_KEEPCNT": 5}  # seconds, seconds, probes without an answer


class Held:
    """Counts the bytes of all connections of a process."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class _WebSocket(WebSocketsSansIOProtocol):
    """One connection. `closed` is called when it has ended."""

    closed: Callable[[], None] | None = None

    def __init__(self, *arguments: Any, held: Held, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._held = held
        self._own_bytes = 0
        self._queued_bytes = 0
        self._since_s, self._num_frames = 0.0, 0
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        found = transport.get_extra_info("socket")
        if found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if hasattr(socket, name):  # not on every system
                    found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), _PIECE_BYTES):
            super().data_received(data[at : at + _PIECE_BYTES])
            self._count()
            if self.close_sent or self.transport.is_closing():
                return

    def _may_come(self, most: int) -> bool:
        """Whether one more frame of a kind may come in this second, of which there may be `most`."""
        if self.loop.time() - self._since_s > 1:
            self._since_s, self._num_frames = self.loop.time(), 0
        self._num_frames += 1
        if self._num_frames <= most:
            return True
        self._refuse(CloseCode.POLICY_VIOLATION, "too many frames in a second")
        return False

    def handle_ping(self) -> None:
        if self._may_come(MAX_PINGS):
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._may_come(MAX_PINGS):
            super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAMES:
            self._refuse(CloseCode.MESSAGE_TOO_BIG, f"a message may have at most {MAX_FRAMES} frames")
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        if self.close_sent or not self._may_come(MAX_MESSAGES):
            self.frames.clear()
            return
        self._queued_bytes += _FRAME_BYTES + sum(map(len, self.frames))
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        message = await super().receive()
        if self.queue.empty():
            self._queued_bytes = 0
            self._count()
        return message

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()
        self._limit = self._limit or self.loop.call_later(ANSWER_PATIENCE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._patience_over()
        if not self.read_paused:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience_over()
        super().connection_lost(exc)
        self._held.num_bytes -= self._own_bytes
        self._own_bytes = 0
        if self.closed is not None:
            self.closed()

    def _patience_over(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _count(self) -> None:
        """Count what this connection holds now, and end it when all hold too much."""
        if self.disconnected:
            return
        parts = sum(map(len, self.frames)) + _FRAME_BYTES * len(self.frames)
        own_bytes = len(self.conn.reader.buffer) + parts + self._queued_bytes
        self._held.num_bytes += own_bytes - self._own_bytes
        self._own_bytes = own_bytes
        if self._held.num_bytes > self._held.max_bytes:
            self._refuse(CloseCode.TRY_AGAIN_LATER, "the messages in progress hold as much memory as they may")

    def _refuse(self, code: CloseCode, reason: str) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        self.conn.fail(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()


def bounded(held: Held | None = None) -> Callable[..., asyncio.Protocol]:
    """What makes the connections of one server, for `start_http`."""
    return functools.partial(_WebSocket, held=held or Held())
