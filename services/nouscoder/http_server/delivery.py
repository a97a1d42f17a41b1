"""Delivery of the answers of one connection, piece by piece."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

if TYPE_CHECKING:
    pass
else:  # the installed parser: httptools or h11
    pass

ANSWER_PATIENCE_S = 60.0
_PIECE_BYTES = 64 * 1024
_SHORT_BYTES = 2048  # above zero, with which asyncio's TLS would pause for ever


class Delivery:
    """ASGI application of one connection: `app` with another `send`. The protocol tells it when writing pauses."""

    def __init__(self, app: ASGIApp, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._app = app
        self._transport = transport
        self._flow = flow
        self._limit: asyncio.TimerHandle | None = None
        self._in_pieces = False

    def begin(self) -> None:
        """Have the protocol told of each pause in writing, which it passes on from now on.

        Writing pauses when more than a short answer waits, and goes on when nothing does. uvloop sends the head and the
        body of a short answer together. Its TLS tells of a pause at once.
        """
        self._transport.set_write_buffer_limits(high=_SHORT_BYTES, low=0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        """Handle one request."""

        async def deliver(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) > _PIECE_BYTES:
                await self._deliver_pieces(message, send)
            else:
                await send(message)
                await self._flow.drain()

        return await self._app(scope, receive, deliver)

    async def _deliver_pieces(self, message: Message, send: Send) -> None:
        body, is_last = message["body"], not message.get("more_body", False)
        self._in_pieces = True
        self.writing_paused()
        try:
            for start in range(0, len(body), _PIECE_BYTES):
                piece = body[start : start + _PIECE_BYTES]
                more = not is_last or start + len(piece) < len(body)
                await send({**message, "body": piece, "more_body": more})
                await self._flow.drain()
        finally:
            self._in_pieces = False
            if not self._flow.write_paused:
                self.writing_resumed()

    def writing_paused(self) -> None:
        """Bytes wait in the transport from now on."""
        if self._limit is None:
            self._limit = asyncio.get_running_loop().call_later(ANSWER_PATIENCE_S, self._transport.abort)

    def writing_resumed(self) -> None:
        """The transport holds no byte any more."""
        if self._limit is not None and not self._in_pieces:
            self._limit.cancel()
            self._limit = None

    def ended(self) -> None:
        """The connection has ended."""
        self._in_pieces = False
        self.writing_resumed()
