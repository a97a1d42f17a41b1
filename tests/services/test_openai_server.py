"""What a server with OpenAI's API may send: answers within limits, and one sentence for everything else."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from nouscoder import openai_server
from nouscoder.logs import Sentences
from nouscoder.openai_server import CompletionFailed, OpenAIServer

MIB = 1024**2
GOOD = json.dumps({"choices": [{"message": {"content": "print(1)"}}], "usage": {"completion_tokens": 4}}).encode()
MESSAGES = [{"role": "user", "content": "?"}]


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_WHILE_UNAVAILABLE", "_WHILE_STARTING"):
        monkeypatch.setattr(openai_server, name, replace(getattr(openai_server, name), max_tries=1))


@asynccontextmanager
async def serving(answer: Callable[[asyncio.StreamWriter], object]) -> AsyncIterator[str]:
    """A server that reads a request's headers and writes this answer."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            answer(writer)
            await writer.drain()
            if not writer.is_closing():
                await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


def answering(body: bytes, status: str = "200 OK", **headers: str) -> Callable[[asyncio.StreamWriter], None]:
    """One whole answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]

    def write(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    return write


async def failure(answer: Callable[[asyncio.StreamWriter], object], timeout_s: float = 30.0) -> str:
    """The sentence of a failed completion, which took at most 16 MiB."""
    async with serving(answer) as url, OpenAIServer(url, timeout_s) as server:
        tracemalloc.start()
        try:
            with pytest.raises(CompletionFailed) as found:
                await server.complete("m", MESSAGES)
            assert tracemalloc.get_traced_memory()[1] < 16 * MIB
        finally:
            tracemalloc.stop()
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 1000
    return str(found.value)


async def test_a_whole_answer_is_read() -> None:
    async with serving(answering(GOOD, content_encoding="identity")) as url, OpenAIServer(url) as server:
        answer = await server.complete("m", MESSAGES)
    assert (answer.text, answer.num_tokens) == ("print(1)", 4)


UNTRIED = pytest.mark.parametrize("url", ["ftp://127.0.0.1/v1", "127.0.0.1:8000/v1", "http://no-such-host.invalid/v1"])


@UNTRIED
async def test_a_url_that_can_never_work_is_said_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr(openai_server, "_WHILE_STARTING", replace(openai_server._WHILE_STARTING, max_tries=99))
    async with OpenAIServer(url) as server:
        with pytest.raises(CompletionFailed, match=re.escape(url)):
            await server.complete("m", MESSAGES)


async def test_a_server_that_was_never_there_is_waited_for_once_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of the requests waited for five minutes, and the line on the terminal was `trying again`."""
    starting = replace(openai_server._WHILE_STARTING, max_tries=3, wait_s=0.001, max_wait_s=0.002)
    monkeypatch.setattr(openai_server, "_WHILE_STARTING", starting)
    tries: list[str] = []

    def refused(request: httpx.Request) -> httpx.Response:
        tries.append(request.method)
        raise httpx.ConnectError("All connection attempts failed")

    async with OpenAIServer("http://127.0.0.1:1/v1") as server:
        server._http = httpx.AsyncClient(transport=httpx.MockTransport(refused))
        errors = await asyncio.gather(*(server.complete("m", MESSAGES) for _ in range(9)), return_exceptions=True)
    assert {str(error) for error in errors} == {
        "http://127.0.0.1:1/v1: the server does not answer: ConnectError: All connection attempts failed;"
        " start it, or correct the URL"
    }
    assert tries == ["GET"] * 3
    (line,) = (Sentences().format(each) for each in caplog.records)
    assert line.startswith("warning: trying again (what=reaching the server, for_s=15, left_s=15, max_tries=3): the se")


async def test_a_server_that_was_reached_is_waited_for_when_it_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    again = replace(openai_server._WHILE_UNAVAILABLE, max_tries=3, wait_s=0.001, max_wait_s=0.002)
    monkeypatch.setattr(openai_server, "_WHILE_UNAVAILABLE", again)
    fates: list[httpx.Response | None] = [
        httpx.Response(404),
        None,
        None,
        httpx.Response(200, stream=httpx.ByteStream(GOOD)),
    ]

    def restarting(_: httpx.Request) -> httpx.Response:
        fate = fates.pop(0)
        if fate is None:
            raise httpx.ConnectError("refused")
        return fate

    async with OpenAIServer("http://127.0.0.1:1/v1") as server:
        server._http = httpx.AsyncClient(transport=httpx.MockTransport(restarting))
        assert (await server.complete("m", MESSAGES)).text == "print(1)"
    assert fates == []


async def test_a_wrong_path_is_told_where_the_api_usually_is() -> None:
    async with serving(answering(b"no", "404 Not Found")) as url, OpenAIServer(url.removesuffix("/v1")) as server:
        with pytest.raises(CompletionFailed, match=r"HTTP 404: no \(the URL of most servers ends in /v1\)"):
            await server.complete("m", MESSAGES)


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "br"])
async def test_a_compressed_answer_is_refused_and_not_unpacked(encoding: str) -> None:
    """64 KiB would become 64 MiB, and with two layers more than any memory."""
    says = await failure(answering(gzip.compress(bytes(64 * MIB)), Content_Encoding=encoding))
    assert f"compresses its answers ({encoding}), which was not asked for" in says


async def test_an_answer_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "MAX_ANSWER_BYTES", MIB)
    assert "is larger than 1 MiB" in await failure(answering(b" " * 4 * MIB))
    assert "HTTP 400: xxxx" in await failure(answering(b"x" * 4 * MIB, "400 Bad Request"))
    assert "HTTP 503: xxxx" in await failure(answering(b"x" * 4 * MIB, "503 Unavailable"))


async def test_an_answer_that_trickles_has_a_deadline() -> None:
    def begin(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

    assert "no whole answer within 0.2 s" in await failure(begin, timeout_s=0.2)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * MIB, "gave no usable answer"),
        (b"[" + b"[]," * MIB + b"[]]", "holds too many values"),
        (b'{"choices": [], "usage": \xff}', "gave no usable answer"),
        (GOOD.replace(b": 4", b": 1e999"), "gave no usable answer"),
        (GOOD[:-1], "gave no usable answer"),
    ],
)
async def test_an_odd_answer_is_one_sentence(body: bytes, says: str) -> None:
    assert says in await failure(answering(body))
