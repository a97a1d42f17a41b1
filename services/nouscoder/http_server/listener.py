"""Serves an ASGI application in the service's own event loop, without installing signal handlers.

INVARIANT: a connection that has not sent the complete head of a request is closed after HEAD_PATIENCE_S, or once it has
sent MAX_HEAD_BYTES and one packet. One that does not take its answer is ended too (delivery.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from nouscoder.http_server.delivery import Delivery
from nouscoder.rpc.server import AddressError, socket_host, split_address

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _UvicornProtocol
else:  # the installed parser: httptools or h11
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _UvicornProtocol

STOP_PATIENCE_S = 5.0
HEAD_PATIENCE_S = 30.0
MAX_HEAD_BYTES = 65536


class _Protocol(_UvicornProtocol):
    """Closes connections whose request head arrives too slowly or grows too long, or that do not take their answer."""

    closed: Callable[[], None] | None = None
    _patience: asyncio.TimerHandle | None = None
    _head_bytes: int | None = None  # None outside of heads. Only httptools reports heads; h11 has its own bound.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._delivery = Delivery(self.app, transport, self.flow)
        self.app = self._delivery
        self._delivery.begin()
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self._wait_no_more()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes <= MAX_HEAD_BYTES or self.transport.is_closing():
                return
            if answering:
                self.transport.close()
            else:
                self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()
        if not self.cycle.response_complete:  # the next, pipelined request
            self._wait_no_more()

    def pause_writing(self) -> None:
        self._delivery.writing_paused()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._delivery.writing_resumed()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        self._delivery.ended()
        super().connection_lost(exc)
        if self.closed is not None:
            self.closed()

    def _wait(self) -> None:
        self._wait_no_more()
        self._patience = self.loop.call_later(HEAD_PATIENCE_S, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers, because rpc.server.stop_event handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def start_http(app: FastAPI, address: str, stack: AsyncExitStack, tls: ssl.SSLContext | None = None) -> str:
    """Listen on `address` (port 0 takes a free port) until `stack` closes. Returns the actual address.

    Raises AddressError when the address cannot be used.
    """
    listening = listen(address)
    host, _ = split_address(address)
    _run(_server_of(app, tls), [listening], stack)
    return f"{host}:{listening.getsockname()[1]}"


async def start_taking(
    app: FastAPI, stack: AsyncExitStack, tls: ssl.SSLContext | None = None
) -> Callable[[socket.socket, Callable[[], None]], Awaitable[None]]:
    """Serve connections that another process has accepted, until `stack` closes.

    Returns the function that takes one. It calls its second argument once, when the connection has ended.
    """
    server = _server_of(app, tls)
    task = _run(server, [], stack)
    while not server.started and not task.done():
        await asyncio.sleep(0.001)  # bounded: uvicorn has nothing to wait for

    async def take(connection: socket.socket, closed: Callable[[], None]) -> None:
        protocol = _Protocol(config=server.config, server_state=server.server_state, app_state=server.lifespan.state)
        protocol.closed = closed
        loop, context = asyncio.get_running_loop(), server.config.ssl
        try:
            await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        except (OSError, EOFError):  # it has ended already, or does not speak TLS
            protocol.closed = None
            closed()

    return take


def _server_of(app: FastAPI, tls: ssl.SSLContext | None) -> _Server:
    """A server for `app` that does not run yet."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        ssl_context_factory=None if tls is None else lambda *_: tls,
        server_header=False,
        proxy_headers=False,  # nothing here depends on the address or the scheme that a proxy names
        timeout_graceful_shutdown=int(STOP_PATIENCE_S),
    )
    return _Server(config)


def _run(server: _Server, sockets: list[socket.socket], stack: AsyncExitStack) -> asyncio.Task[None]:
    """Run the server until `stack` closes, which also closes the sockets."""
    task = asyncio.ensure_future(server.serve(sockets=sockets))

    async def stop() -> None:
        server.should_exit = True
        await asyncio.wait({task}, timeout=2 * STOP_PATIENCE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for listening in sockets:
            listening.close()

    stack.push_async_callback(stop)
    return task


def listen(address: str) -> socket.socket:
    """A socket that listens on `address`. Raises AddressError."""
    host, port = split_address(address)
    host = socket_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # IPPROTO_TCP is explicit because asyncio disables Nagle's algorithm (40 ms per answer) only on such sockets.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise AddressError(f"cannot listen on {address} for HTTP: {_reason(error)}") from error
    return listening


def _reason(error: OSError) -> str:
    """The reason in words. The error of a name that cannot be resolved has no system errno."""
    return str(error) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
