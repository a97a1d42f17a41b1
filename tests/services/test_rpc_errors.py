"""Errors over gRPC: a handler's error becomes a status code, and the client raises an error with its message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from nouscoder.rpc.channel import (
    PeerBusy,
    PeerError,
    PeerNotFound,
    PeerRefused,
    PeerUnreachable,
    ServiceClient,
    peer_error,
)
from nouscoder.rpc.convert import InvalidMessage
from nouscoder.rpc.status_codes import StatusCodes

NAME = "test.Service"


class Full(Exception):
    """Represents a full queue."""

    retry_after_s = 7


class Missing(Full):
    """A subclass with its own code."""


class Away(Exception):
    """A service whose store is away."""


class Defect(Exception):
    """An error that is not in the table."""


ERRORS: dict[str, Exception] = {
    "full": Full("no room"),
    "missing": Missing("no such thing"),
    "invalid": InvalidMessage("field: wrong"),
    "away": Away("its store is away"),
    "defect": Defect("surprise"),
}
TABLE: dict[type[Exception], grpc.StatusCode] = {
    Full: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Missing: grpc.StatusCode.NOT_FOUND,
    Away: grpc.StatusCode.UNAVAILABLE,
}


async def unary(request: bytes, context: Any) -> bytes:
    raise ERRORS[request.decode()]


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"first"
    raise ERRORS[request.decode()]


class Handler(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return {
            f"/{NAME}/Unary": grpc.unary_unary_rpc_method_handler(unary),
            f"/{NAME}/Stream": grpc.unary_stream_rpc_method_handler(stream),
        }.get(str(details.method))


class Stub:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.unary: Any = channel.unary_unary(f"/{NAME}/Unary")
        self.streaming: Any = channel.unary_stream(f"/{NAME}/Stream")


class Client(ServiceClient[Stub]):
    async def unary(self, kind: str) -> bytes:
        return await self._call(lambda: self._stub.unary(kind.encode()))

    async def stream(self, kind: str) -> list[bytes]:
        return [answer async for answer in self._stream(self._stub.streaming(kind.encode()), 10.0)]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        server = grpc.aio.server(interceptors=[StatusCodes(TABLE, [NAME])])
        server.add_generic_rpc_handlers((Handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0.1)
        yield await stack.enter_async_context(Client("thing", Stub, f"127.0.0.1:{port}", patience_s=0.0))


@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize(
    ("error", "expected", "sentence"),
    [
        ("full", PeerBusy, "thing at .*: RESOURCE_EXHAUSTED: no room"),
        ("missing", PeerNotFound, "thing at .*: NOT_FOUND: no such thing"),
        ("invalid", PeerRefused, "thing at .*: INVALID_ARGUMENT: field: wrong"),
        ("defect", PeerError, "thing at .*: UNKNOWN: "),
    ],
)
async def test_an_error_of_a_handler_is_a_peer_error_of_the_client(
    client: Client, kind: str, error: str, expected: type[PeerError], sentence: str
) -> None:
    with pytest.raises(expected, match=sentence) as caught:
        await getattr(client, kind)(error)
    assert type(caught.value) is expected


async def test_the_time_of_the_next_try_is_in_a_trailer(client: Client) -> None:
    with pytest.raises(PeerBusy) as caught:
        await client.unary("full")
    cause = caught.value.__cause__
    assert isinstance(cause, grpc.aio.AioRpcError)
    assert dict(cause.trailing_metadata()) == {"error": "Full", "retry-after": "7"}


async def test_an_unreachable_service_is_named() -> None:
    async with Client("thing", Stub, "127.0.0.1:1", patience_s=0.2) as client:
        with pytest.raises(PeerUnreachable, match=r"thing at 127\.0\.0\.1:1 has not answered for 0 s$"):
            await client.unary("full")


async def test_a_service_that_cannot_serve_now_is_quoted(client: Client) -> None:
    with pytest.raises(PeerUnreachable, match=r"thing at .* does not answer: its store is away$"):
        await client.unary("away")


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_code_has_an_error_class(code: grpc.StatusCode) -> None:
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(code, metadata, metadata, details="why")
    assert isinstance(peer_error("thing", error), PeerError)


class ReadableCall:
    """A streaming call whose next message arrives when the test says so."""

    def __init__(self) -> None:
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    async def read(self) -> bytes:
        return await self.message

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_cancellation_that_comes_together_with_a_message_ends_the_stream() -> None:
    call = ReadableCall()
    received: list[bytes] = []

    async def consume() -> None:
        async for message in Client("thing", Stub, "127.0.0.1:1", patience_s=0.0)._stream(call, 60):
            received.append(message)
            call.message = asyncio.get_running_loop().create_future()

    consumer = asyncio.ensure_future(consume())
    await asyncio.sleep(0)
    call.message.set_result(b"a message")
    consumer.cancel()
    done, _ = await asyncio.wait([consumer], timeout=60)
    consumer.cancel()
    assert done
    assert consumer.cancelled()
    assert received == []
