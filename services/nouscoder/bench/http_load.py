"""A lean HTTP/1.1 client for load. Client and service share the cores, so a request must be cheap.

It supports only answers with a Content-Length to POST, and neither chunked encoding nor TLS.

INVARIANT: a connection carries one request at a time and is reused only after the complete previous answer. Every
`post` gives exactly one answer or raises LoadFault within _LIMIT_S.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import StreamReader, StreamWriter
from typing import Self
from urllib.parse import urlsplit

from nouscoder.errors import NousCoderError

_LIMIT_S = 120.0
_MOST_CONNECTIONS = 256
_IDLE_LIMIT_S = 2.0  # servers close connections that are idle for longer (uvicorn: 5 s)


class LoadFault(NousCoderError):
    """There was no answer, or it was not valid HTTP. The message says which."""


def is_address(url: str) -> bool:
    """Whether it is of the form http://host:port."""
    try:
        parts = urlsplit(url)
        return parts.scheme == "http" and bool(parts.hostname and parts.port) and not parts.path
    except ValueError:  # no such port or host
        return False


class LeanClient:
    """Connections to the service at `url`, http://host:port, bound to one event loop. Raises LoadFault for others."""

    def __init__(self, url: str) -> None:
        if not is_address(url):
            raise LoadFault(f"{url!r:.80} is not of the form http://host:port")
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json"
        self._places = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._free: list[tuple[StreamReader, StreamWriter, float]] = []  # with the moment of the last answer

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send one request; returns status and body. Raises LoadFault when it gets no answer within the limit."""
        head = f"POST {path} HTTP/1.1\r\n{self._headers}\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            async with asyncio.timeout(_LIMIT_S), self._places:
                reader, writer = await self._connection()
                try:
                    writer.write(head.encode("latin-1") + body)
                    status, size, stays_open = _read_head(await reader.readuntil(b"\r\n\r\n"))
                    answer = await reader.readexactly(size)
                except BaseException:
                    writer.close()
                    raise
        except TimeoutError:
            raise LoadFault(f"no answer within {_LIMIT_S:g} s") from None
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            raise LoadFault(f"the service closed the connection before its answer: {error}") from error
        except OSError as error:
            raise LoadFault(f"{self._host}:{self._port} cannot be reached: {error}") from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise LoadFault(f"the answer is not HTTP: {error}") from error
        if stays_open:
            self._free.append((reader, writer, time.monotonic()))
        else:
            writer.close()
        return status, answer

    async def _connection(self) -> tuple[StreamReader, StreamWriter]:
        """The connection used last, so that unneeded ones become idle; else a new one."""
        while self._free:
            reader, writer, free_since_s = self._free.pop()
            if not reader.at_eof() and time.monotonic() - free_since_s < _IDLE_LIMIT_S:
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the free connections."""
        for _reader, writer, _moment in self._free:
            writer.close()
        await asyncio.sleep(0)  # the transports close in the loop's next round


def _read_head(head: bytes) -> tuple[int, int, bool]:
    """Status, size of the body, and whether the connection stays open. Raises ValueError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{first!r:.60}")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if not headers.get("content-length", "").isdigit():
        raise ValueError("no Content-Length")
    return int(rest[:3]), int(headers["content-length"]), headers.get("connection", "").lower() != "close"
