"""The HTTP client of the load tests: one answer or LoadFault per request, and stray bytes are counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from tests.load.lean_client import LeanClient, parse_head

from nouscoder.bench.http_load import LoadFault

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Kind: a\r\n\r\nhi"


@asynccontextmanager
async def served(handle: Handler) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that passes each complete request to `handle`. Yields its URL and the numbers of its connections."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections))
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await handle(await reader.readexactly(length), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


async def test_requests_share_a_connection_and_answers_may_arrive_in_pieces() -> None:
    async def handle(body: bytes, writer: asyncio.StreamWriter) -> None:
        for at in range(len(OK)):
            writer.write(OK[at : at + 1])
            await asyncio.sleep(0)

    async with served(handle) as (url, connections), LeanClient(url, {"A": "b"}) as client:
        for _ in range(3):
            status, headers, body = await client.post("/x", b"12345", {"C": "d"})
            assert (status, headers["x-kind"], body) == (200, "a", b"hi")
        assert connections == [0]
        assert client.num_stray_bytes == 0


async def test_concurrent_requests_have_separate_connections_up_to_the_limit() -> None:
    release = asyncio.Event()

    async def handle(body: bytes, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async with served(handle) as (url, connections), LeanClient(url, num_connections=2) as client:
        asking = [asyncio.create_task(client.post("/", b"%d" % number)) for number in range(5)]
        while len(connections) < 2:
            await asyncio.sleep(0.01)
        release.set()
        assert [body for _, _, body in await asyncio.gather(*asking)] == [b"0", b"1", b"2", b"3", b"4"]
        assert len(connections) == 2


async def test_a_second_answer_to_one_request_is_detected() -> None:
    async def handle(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + OK)

    async with served(handle) as (url, connections), LeanClient(url) as client:
        await client.post("/", b"")
        await client.post("/", b"")
        assert client.num_stray_bytes == 2 * len(OK)
        assert len(connections) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", "closed the connection"),
        (b"", "closed the connection"),
        (b"SSH-2.0\r\n\r\n", "not HTTP: 'SSH-2.0'"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "no Content-Length"),
    ],
)
async def test_an_invalid_answer_is_a_fault(answer: bytes, message: str) -> None:
    async def handle(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with served(handle) as (url, _), LeanClient(url) as client:
        with pytest.raises(LoadFault, match=message):
            await client.post("/", b"")


async def test_no_wait_is_longer_than_the_limit() -> None:
    async def handle(body: bytes, writer: asyncio.StreamWriter) -> None:
        return None

    async with served(handle) as (url, _), LeanClient(url, limit_s=0.05) as client:
        with pytest.raises(LoadFault, match=r"no answer within 0\.05 s"):
            await client.post("/", b"")


def test_only_plain_http_addresses_are_accepted() -> None:
    for url in ("https://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1"):
        with pytest.raises(LoadFault, match="not of the form"):
            LeanClient(url)
    with pytest.raises(ValueError, match="Content-Length"):
        parse_head(b"HTTP/1.1 204 No Content\r\nA: b")
