"""A lean HTTP/1.1 client for load tests. Client and service share the cores, so a request must be cheap.

It supports only the answers of the grading service to POST: a status, headers with Content-Length, a body. It supports
neither chunked encoding nor TLS.

INVARIANT: a connection carries one request at a time and is reused only after the complete previous answer. Every
`post` gives exactly one answer or raises LoadFault within `limit_s`. Bytes that answer no request are counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

from nouscoder.bench.http_load import LoadFault, is_address

_IDLE_LIMIT_S = 2.0  # servers close connections that are idle for longer (uvicorn: 5 s)
_MAX_HEAD_BYTES = 64 * 1024
_NO_HEADERS: Mapping[str, str] = {}

Answer = tuple[int, dict[str, str], bytes]  # status, headers with names in lower case, body


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.is_closed = False
        self.free_since_s = time.monotonic()
        self.num_stray_bytes = 0
        self._transport: asyncio.WriteTransport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._received = bytearray()
        self._head: tuple[int, dict[str, str]] | None = None
        self._num_expected = 0

    async def ask(self, request: bytes) -> Answer:
        """Send a whole request. Raises LoadFault."""
        if self._transport is None or self.is_closed:
            raise LoadFault("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self.free_since_s = time.monotonic()
            if not self._answer.done() or self._answer.cancelled():
                self.close()
            self._answer = None

    def close(self) -> None:
        """Close the connection. A waiting request fails."""
        if self._transport is not None and not self.is_closed:
            self._transport.close()
        self.is_closed = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transport has another base class

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_closed = True
        self._fail(f"the service closed the connection before its answer: {error or 'no reason given'}")

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._answer is None or self._answer.done():
            self.num_stray_bytes += len(data)
            self.close()
            return
        self._received += data
        try:
            self._read()
        except ValueError as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.close()

    def _read(self) -> None:
        if self._head is None:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                if len(self._received) > _MAX_HEAD_BYTES:
                    raise ValueError("the head is too long")
                return
            self._head = parse_head(bytes(self._received[:end]))
            del self._received[: end + 4]
            self._num_expected = int(self._head[1]["content-length"])
        if len(self._received) < self._num_expected:
            return
        (status, headers), body = self._head, bytes(self._received[: self._num_expected])
        self.num_stray_bytes += len(self._received) - self._num_expected
        self._received.clear()
        self._head = None
        if self.num_stray_bytes or headers.get("connection", "").lower() == "close":
            self.close()
        assert self._answer is not None
        self._answer.set_result((status, headers, body))

    def _fail(self, message: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(LoadFault(message))


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer. Raises ValueError when it is not HTTP or has no Content-Length."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{first!r:.60}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if not headers.get("content-length", "").isdigit():
        raise ValueError("no Content-Length")
    return int(rest[:3]), headers


class LeanClient:
    """A pool of at most `num_connections` to one service, bound to one event loop. Every request has `headers`."""

    def __init__(
        self, url: str, headers: Mapping[str, str] = _NO_HEADERS, num_connections: int = 256, limit_s: float = 120.0
    ) -> None:
        """`url` is http://host:port. Raises LoadFault for any other."""
        if not is_address(url):
            raise LoadFault(f"{url!r:.80} is not of the form http://host:port")
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 0)
        self._fixed = _lines({"Host": parts.netloc, "Content-Type": "application/json", **headers})
        self._limit_s = limit_s
        self._places = asyncio.Semaphore(num_connections)
        self._free: list[_Connection] = []
        self._num_stray_bytes = 0
        self.num_open = 0  # connections, in use and free

    @property
    def num_stray_bytes(self) -> int:
        """The number of bytes received that answer no request, such as a duplicate answer."""
        return self._num_stray_bytes + sum(connection.num_stray_bytes for connection in self._free)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> Answer:
        """Send one request. Raises LoadFault when it gets no answer within the limit."""
        head = f"POST {path} HTTP/1.1\r\n{self._fixed}{_lines(headers)}Content-Length: {len(body)}\r\n\r\n"
        try:
            async with asyncio.timeout(self._limit_s), self._places:
                connection = await self._connection()
                try:
                    return await connection.ask(head.encode("latin-1") + body)
                finally:
                    self._put_back(connection)
        except TimeoutError:
            raise LoadFault(f"no answer within {self._limit_s:g} s") from None
        except OSError as error:
            raise LoadFault(f"{self._host}:{self._port} cannot be reached: {error}") from error

    async def _connection(self) -> _Connection:
        """The connection used last, so that unneeded ones become idle; else a new one."""
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed and time.monotonic() - connection.free_since_s < _IDLE_LIMIT_S:
                return connection
            self._drop(connection)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        self.num_open += 1
        return connection

    def _put_back(self, connection: _Connection) -> None:
        if connection.is_closed:
            self._drop(connection)
        else:
            self._free.append(connection)

    def _drop(self, connection: _Connection) -> None:
        connection.close()
        self.num_open -= 1
        self._num_stray_bytes += connection.num_stray_bytes

    async def close(self) -> None:
        """Close the free connections."""
        while self._free:
            self._drop(self._free.pop())
        await asyncio.sleep(0)  # the transports close in the loop's next round

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
