"""The HTTP client of the benches: one answer or LoadFault per request, and connections are used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nouscoder.bench import http_load
from nouscoder.bench.http_load import LeanClient, LoadFault

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@asynccontextmanager
async def answering(answer: bytes | None, *, closes: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives this answer to each request, byte by byte. Yields its URL and the head of each connection."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(b"")
        try:
            while True:
                heads[-1] = head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                for at in range(len(answer or b"")):
                    writer.write((answer or b"")[at : at + 1])
                    await asyncio.sleep(0)
                if closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


async def test_requests_share_a_connection_one_after_the_other_and_have_their_own_at_once() -> None:
    async with answering(OK) as (url, heads), LeanClient(url) as client:
        for _ in range(3):
            assert await client.post("/v1/grade", b"12345") == (200, b"hi")
        assert len(heads) == 1
        assert heads[0].startswith(b"POST /v1/grade HTTP/1.1\r\nHost: 127.0.0.1:")
        assert await asyncio.gather(*(client.post("/", b"") for _ in range(4))) == [(200, b"hi")] * 4
        assert len(heads) == 4


async def test_a_connection_that_the_service_closes_or_that_was_idle_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closing = OK.replace(b"content-length", b"Connection: close\r\nContent-Length")
    async with answering(closing, closes=True) as (url, heads), LeanClient(url) as client:
        assert [await client.post("/", b"") for _ in range(2)] == [(200, b"hi")] * 2
        assert len(heads) == 2
    monkeypatch.setattr(http_load, "_IDLE_LIMIT_S", 0.0)
    async with answering(OK) as (url, heads), LeanClient(url) as client:
        assert [await client.post("/", b"") for _ in range(2)] == [(200, b"hi")] * 2
        assert len(heads) == 2


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
    async with answering(answer, closes=True) as (url, _), LeanClient(url) as client:
        with pytest.raises(LoadFault, match=message):
            await client.post("/", b"")


async def test_no_wait_is_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_load, "_LIMIT_S", 0.05)
    async with answering(None) as (url, _), LeanClient(url) as client:
        with pytest.raises(LoadFault, match=r"no answer within 0\.05 s"):
            await client.post("/", b"")


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1", "http://a:99999", "http://a:1/x"]
)
def test_only_plain_http_addresses_are_accepted(url: str) -> None:
    with pytest.raises(LoadFault, match="not of the form"):
        LeanClient(url)
