"""Serves an ASGI application in the service's own event loop, without installing signal handlers, over HTTP or HTTPS.

INVARIANT: a connection that has not sent the complete head of a request is closed after HEAD_PATIENCE_S, or once it has
sent MAX_HEAD_BYTES and one packet. So is one with more than MAX_PIPELINED requests that wait for the one before them,
or with MAX_CHUNKS parts of a body in one packet. At most MOST_CONNECTIONS are open: one more ends the oldest that has
not sent its whole request, or itself. `send` of ASGI returns when the transport has given the message to the system, or
the connection has ended, so an application that holds an answer until then knows how long it takes memory. A client has
ANSWER_PATIENCE_S for each message (a whole answer, or a part of a stream). Then its connection is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import uvicorn
from fastapi import FastAPI

from nouscoder.config import TlsSection
from nouscoder.errors import Unusable
from nouscoder.http_server.delivery import Delivery
from nouscoder.rpc.addresses import AddressError, socket_host, split_address
from nouscoder.rpc.tls import Renewed

Done = TypeVar("Done")
WebSockets = Callable[..., asyncio.Protocol]  # makes the protocol of a WebSocket: websocket.bounded()


if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _UvicornProtocol
else:  # the installed parser: httptools or h11
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _UvicornProtocol

STOP_PATIENCE_S = 5.0
HEAD_PATIENCE_S = 30.0
MAX_HEAD_BYTES = 65536
MAX_PIPELINED = 32
MAX_CHUNKS = 8192  # in what is read at once, 256 KiB
MAX_MESSAGE_BYTES = 1024**2  # of a WebSocket
_MOST_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
# At most half of the files that the process may have open, so that connections leave the others to its work.
MOST_CONNECTIONS = 4096 if _MOST_FILES == resource.RLIM_INFINITY else min(4096, _MOST_FILES // 2)


@runtime_checkable
class Upgraded(Protocol):
    """The protocol of a connection that is no longer HTTP (websocket.py)."""

    closed: Callable[[], None] | None


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
        self._since_s = self.loop.time()
        self._wait()
        if len(self.connections) > MOST_CONNECTIONS:
            others = [other for other in self.connections if isinstance(other, _Protocol) and other is not self]
            unfinished = [other for other in others if other._is_unfinished and not other.transport.is_closing()]
            min(unfinished, key=lambda other: other._since_s, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        self._num_chunks = 0
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
        if len(self.pipeline) >= MAX_PIPELINED:
            self.send_400_response(f"At most {MAX_PIPELINED} requests may be sent before the first is answered.")
            raise ValueError  # ends the parsing of what has arrived
        super().on_message_begin()
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            self.send_400_response("The chunks of the body are too small.")
            raise ValueError
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

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

    def handle_websocket_upgrade(self, *event: Any) -> None:
        self._wait_no_more()
        self._delivery.ended()
        super().handle_websocket_upgrade(*event)
        after = self.transport.get_protocol()
        if isinstance(after, Upgraded):
            after.closed = self.closed

    @property
    def _is_unfinished(self) -> bool:
        """Whether bytes of a request are to come."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

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


async def start_http(
    app: FastAPI,
    address: str,
    stack: AsyncExitStack,
    tls: ssl.SSLContext | None = None,
    websocket: WebSockets | None = None,
) -> str:
    """Listen on `address` (port 0 takes a free port) until `stack` closes. Returns the actual address.

    Raises AddressError when the address cannot be used.
    """
    listening = listen(address)
    host, _ = split_address(address)
    await serve_http(app, listening, stack, tls, websocket)
    return f"{host}:{listening.getsockname()[1]}"


async def start_apart(app: FastAPI, address: str, stack: AsyncExitStack) -> str:
    """`start_http` in a thread with an event loop of its own, which no connection of another address delays."""
    loop, own_stack = asyncio.new_event_loop(), AsyncExitStack()
    threading.Thread(target=loop.run_forever, name="apart", daemon=True).start()
    stack.callback(loop.call_soon_threadsafe, loop.stop)

    async def in_thread(work: Coroutine[Any, Any, Done]) -> Done:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    stack.push_async_callback(lambda: in_thread(own_stack.aclose()))
    return await in_thread(start_http(app, address, own_stack))


async def serve_http(
    app: FastAPI,
    listening: socket.socket,
    stack: AsyncExitStack,
    tls: ssl.SSLContext | None = None,
    websocket: WebSockets | None = None,
) -> None:
    """Serve on a listening socket until `stack` closes, which also closes the socket."""
    _run(_server_of(app, tls, websocket), [listening], stack)


async def start_taking(
    app: FastAPI, stack: AsyncExitStack, tls: ssl.SSLContext | None = None, websocket: WebSockets | None = None
) -> Callable[[socket.socket, Callable[[], None]], Awaitable[None]]:
    """Serve connections that another process has accepted, until `stack` closes.

    Returns the function that takes one. It calls its second argument once, when the connection has ended.
    """
    server = _server_of(app, tls, websocket)
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


def _server_of(app: FastAPI, tls: ssl.SSLContext | None, websocket: WebSockets | None) -> _Server:
    """A server for `app` that does not run yet. Without `websocket` it takes no WebSocket."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws=websocket or "none",  # type: ignore[arg-type]  # a class of its own, or a function that makes one
        ssl_context_factory=None if tls is None else lambda *_: tls,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
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
        # The error of a name that cannot be resolved has no system errno.
        reason = str(error) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise AddressError(f"cannot listen on {address} for HTTP: {reason}") from error
    return listening


def http_context(section: TlsSection) -> ssl.SSLContext | None:
    """The TLS context of an HTTP API; None when TLS is off. Renewed files count from the next connection on.

    Raises Unusable.
    """
    if not section.certificate:
        return None
    renewed = Renewed(files_of(section), lambda: checked_context(section))
    first = renewed.current()

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, of: ssl.SSLContext) -> None:
        connection.context = renewed.current()

    first.sni_callback = choose  # OpenSSL calls it for each connection, also for one that names no server
    return first


def files_of(section: TlsSection) -> tuple[str, str, str]:
    """The files of certificate and key, and of the clients' authority or ""."""
    return section.certificate, section.key, section.client_ca


def checked_context(section: TlsSection) -> ssl.SSLContext:
    """The context of the files as they are now. Raises Unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(section.certificate, section.key)
        if section.client_ca:
            context.load_verify_locations(section.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, files_of(section)))
        raise Unusable(f"TLS cannot be set up from {files}: {error.strerror or error}") from error
    return context
