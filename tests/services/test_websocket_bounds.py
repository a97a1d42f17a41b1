"""What a client can make the process hold over WebSockets: the INVARIANT of http_server/websocket.py."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode

from nouscoder.http_server import listener, websocket
from nouscoder.http_server.listener import MAX_MESSAGE_BYTES, WebSockets, start_http, start_taking
from nouscoder.http_server.websocket import MAX_FRAMES, Held, bounded

PATIENT: dict[str, Any] = {"proxy": None, "open_timeout": 60, "ping_interval": None}
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def frame(opcode: Opcode, data: bytes, *, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def echo(busy: asyncio.Event | None = None) -> FastAPI:
    """Sends each message back. After the message "wait" it takes no further one until `busy` is set."""
    app = FastAPI()

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        with suppress(WebSocketDisconnect):
            while (text := await socket.receive_text()) != "wait":
                await socket.send_text(text)
            await (busy or asyncio.Event()).wait()

    return app


@asynccontextmanager
async def served(websockets: WebSockets, busy: asyncio.Event | None = None) -> AsyncIterator[tuple[str, int]]:
    busy = busy or asyncio.Event()
    async with AsyncExitStack() as stack:
        host, _, port = (await start_http(echo(busy), "127.0.0.1:0", stack, websocket=websockets)).rpartition(":")
        stack.callback(busy.set)
        yield host, int(port)


async def opened(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that speaks frames by hand."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(HANDSHAKE)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    return reader, writer


async def close_code(reader: asyncio.StreamReader) -> int:
    """The code of the close frame that comes next."""
    head = await reader.readexactly(2)
    assert head[0] & 0x0F == Opcode.CLOSE
    code: int = struct.unpack("!H", (await reader.readexactly(head[1]))[:2])[0]
    assert await reader.read() == b""
    return code


@pytest.mark.parametrize(
    "parts",
    [
        [frame(Opcode.TEXT, b"", fin=False), *[frame(Opcode.CONT, b"", fin=False)] * MAX_FRAMES],
        [frame(Opcode.TEXT, b"x" * 2**19, fin=False), b"\x80\xff" + struct.pack("!Q", 2**19 + 1)],
        [b"\x81\xff" + struct.pack("!Q", MAX_MESSAGE_BYTES + 1)],
    ],
    ids=["frames without a byte", "frames that are large together", "one large frame"],
)
async def test_a_message_has_a_bound(parts: list[bytes]) -> None:
    async with served(bounded()) as address:
        reader, writer = await opened(address)
        writer.writelines(parts)
        assert await close_code(reader) == 1009


async def test_all_connections_hold_a_bounded_number_of_bytes() -> None:
    """Of begun messages, and of messages that wait while the application is busy. What is taken is free again."""
    large = frame(Opcode.TEXT, b"x" * 60_000)
    held, busy = Held(100_000), asyncio.Event()
    async with served(bounded(held), busy) as address:
        for begun in (large[:-1], frame(Opcode.TEXT, b"wait") + large):
            busy.clear()
            both = [await opened(address) for _ in range(2)]
            for _, writer in both:
                writer.write(begun)
            codes = [asyncio.ensure_future(close_code(reader)) for reader, _ in both]
            done, others = await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() for task in done] == [1013]
            assert 50_000 <= held.num_bytes <= held.max_bytes
            for task in others:
                task.cancel()
            for _, writer in both:
                writer.close()
            busy.set()
            async with asyncio.timeout(60):
                while held.num_bytes:
                    await asyncio.sleep(0.01)
        async with connect(f"ws://127.0.0.1:{address[1]}/ws", **PATIENT) as session:
            for _ in range(5):
                await session.send("x" * 60_000)
                assert len(await session.recv()) == 60_000


async def test_from_a_client_that_does_not_read_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings are answered without the application, so they would fill the memory with answers."""
    monkeypatch.setattr(websocket, "ANSWER_PATIENCE_S", 0.2)
    pings = frame(Opcode.PING, b"x" * 100) * 5000
    loop = asyncio.get_running_loop()

    async def flood(client: socket.socket) -> None:
        for _ in range(500):
            await loop.sock_sendall(client, pings)

    async with served(bounded()) as address:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address)
            client.setblocking(False)
            await loop.sock_sendall(client, HANDSHAKE)
            assert (await loop.sock_recv(client, 1000)).endswith(b"\r\n\r\n")
            with pytest.raises(ConnectionError):  # ended after its patience
                await flood(client)


async def test_the_patience_for_heads_ends_with_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the connection would be closed HEAD_PATIENCE_S after it was made."""
    made, make = [], listener._Protocol.connection_made

    def note(protocol: listener._Protocol, transport: asyncio.Transport) -> None:
        made.append(protocol)
        make(protocol, transport)
        assert protocol._patience is not None

    monkeypatch.setattr(listener._Protocol, "connection_made", note)
    async with served(bounded()) as address, connect(f"ws://127.0.0.1:{address[1]}/ws", **PATIENT) as session:
        await session.send("still here")
        assert await session.recv() == "still here"
        assert [protocol._patience for protocol in made] == [None]


async def test_messages_are_not_compressed_and_a_closed_connection_is_told() -> None:
    ended = asyncio.Event()
    async with AsyncExitStack() as stack:
        take = await start_taking(echo(), stack, websocket=bounded())
        ours, theirs = socket.socketpair()
        await take(theirs, ended.set)
        async with connect("ws://localhost/ws", sock=ours, compression="deflate", **PATIENT) as session:
            assert not session.protocol.extensions
            await session.send("hello")
            assert await session.recv() == "hello"
            assert not ended.is_set()
        await asyncio.wait_for(ended.wait(), 60)


async def test_without_websockets_none_is_taken() -> None:
    async with AsyncExitStack() as stack:
        address = await start_http(echo(), "127.0.0.1:0", stack)
        with pytest.raises(InvalidStatus, match="404"):
            async with connect(f"ws://{address}/ws", **PATIENT):
                pass
