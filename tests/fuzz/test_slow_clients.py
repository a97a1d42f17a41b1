"""Clients that send too slowly get an error, and hold no connection for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.http_server import body, listener
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import OnOutcome

PATIENCE_S = 0.3
LIMIT_S = 60.0


class Accepting:
    """A grader that accepts everything."""

    backend = "none"
    num_slots = 1
    unfinished = 0

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        return Verdict(VerdictKind.ACCEPTED, 1, 1, 1, 0.0, self.backend)


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The REST API with short time limits. After the test it must still answer other clients."""
    monkeypatch.setattr(body, "READ_PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(listener, "HEAD_PATIENCE_S", PATIENCE_S)
    app = make_app(Accepting(), CollectorRegistry(), DrainState(), 10_000)
    async with AsyncExitStack() as stack:
        where = await listener.start_http(app, "127.0.0.1:0", stack)
        yield where
        async with httpx.AsyncClient() as client:
            good = {"code": "1", "tests": {"type": "stdin", "cases": [{"input": "", "output": ""}]}}
            assert (await client.post(f"http://{where}/v1/grade", json=good)).json()["verdict"] == "accepted"


async def trickled(address: str, head: bytes, part: bytes) -> bytes:
    """The answer to `head` and repeated `part`s, until the service closes the connection or answers."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def send() -> None:
        writer.write(head)
        while part:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.05)

    sending = asyncio.ensure_future(send())
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _until_said(reader)
    finally:
        sending.cancel()
        writer.close()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await sending
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _until_said(reader: asyncio.StreamReader) -> bytes:
    """The received bytes up to the end of an error answer, or of the connection."""
    said = b""
    while b"}" not in said and (more := await reader.read(4096)):
        said += more
    return said


@pytest.mark.parametrize("path", ["/v1/grade", "/v1/grade/stream", "/v1/grade/batch"])
@pytest.mark.parametrize(
    ("header", "part"),
    [("Transfer-Encoding: chunked", b"1\r\n \r\n"), ("Content-Length: 5000", b" "), ("Content-Length: 5000", b"")],
    ids=["chunks", "bytes", "nothing"],
)
async def test_a_slow_body_is_408(address: str, path: str, header: str, part: bytes) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode()
    answer = await trickled(address, head, part)
    assert answer.startswith(b"HTTP/1.1 408 "), answer
    assert json.loads(answer.rpartition(b"\r\n")[2])["field"] == "body"


@pytest.mark.parametrize(
    ("head", "part"),
    [(b"", b""), (b"POST", b""), (b"GET / HTTP/1.1\r\n", b"A: b\r\n")],
    ids=["nothing", "half a line", "headers"],
)
async def test_the_connection_of_an_endless_head_is_closed(address: str, head: bytes, part: bytes) -> None:
    answer = await trickled(address, head, part)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 "), answer
