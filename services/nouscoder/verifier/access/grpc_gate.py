"""gRPC interceptor that handles request id, API key, memory and malformed messages of every call.

INVARIANT: no message with more than MOST_FIELDS is parsed. The one message of a call is counted in the memory budget
before it is parsed, and until the call has ended. The servicer counts the messages of a stream. gRPC holds what has
arrived of a message, so above a bound of the process's memory every call ends whose message is not whole. Connections
that send headers without end are closed (grpc_connections.py). Health and reflection need no key.

Parsing takes 0.6 µs and 60 bytes for each field, so 64 MiB of empty messages take 20 s and 2 GB, and the interpreter
runs nothing else meanwhile. Counting stops at a bound. Source of the format: protobuf.dev, Encoding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.freed_memory import held_bytes
from nouscoder.http_server.memory_budget import MemoryBudget, MemoryBudgetExceeded, Reservation
from nouscoder.rpc.addresses import split_address, unix_path
from nouscoder.rpc.convert import InvalidMessage
from nouscoder.verifier.access.caller import ANONYMOUS, Caller, request_id_from, set_caller
from nouscoder.verifier.access.grpc_connections import Connections

MOST_FIELDS = 45_000  # of a message with those inside it: 10,000 tests have 30,000
_FEW_FIELDS_BYTES = 64 * 1024  # the fields of a shorter message are not counted
_LOOK_S, _FULL = 0.1, "full"
_GROWN_BYTES = 16 * 1024**2  # between two looks at the connections
_OPEN = ("/grpc.health.v1.", "/grpc.reflection.")
if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Context = grpc.aio.ServicerContext[Any, Any]


class GrpcGate(grpc.aio.ServerInterceptor):
    """Sets the caller of each call. Answers UNAUTHENTICATED if keys are configured and the call has no valid one."""

    def __init__(self, api_keys: ApiKeys, budget: MemoryBudget) -> None:
        self._api_keys = api_keys
        self._budget = budget
        self._reading: set[asyncio.Future[Any]] = set()
        self._connections = Connections()

    async def bound_memory(self, most_bytes: int, address: str = "") -> None:
        """Look for ever whether the process holds more, and then end the calls whose message has not arrived.

        Whenever it has grown, close the connections to `address` that send headers without end.
        """
        port = 0 if not address or unix_path(address) else split_address(address)[1]
        least = held_bytes()
        while True:
            await asyncio.sleep(_LOOK_S)
            held = held_bytes()
            is_full = held > most_bytes
            if is_full:
                for reading in self._reading:
                    reading.cancel(_FULL)
            if port and (is_full or self._connections.suspects or held > least + _GROWN_BYTES):
                self._connections.close_unknown(port, is_full)
                least = held
            least = min(least, held)

    async def _arrived(self, context: _Context) -> Any:
        """The next message, or gRPC's EOF. Raises MemoryBudgetExceeded."""
        reading = asyncio.ensure_future(context.read())
        self._reading.add(reading)
        try:
            return await reading
        except asyncio.CancelledError as ended:
            if ended.args == (_FULL,):
                raise MemoryBudgetExceeded from None
            raise
        finally:
            self._reading.discard(reading)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Handle one call."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(_OPEN):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        caller = self._caller(metadata)
        if caller is None:
            # A handler of streams, whatever the method: only those start before the request has been read.
            return grpc.stream_stream_rpc_method_handler(_refuse)
        set_caller(caller)
        return self._reading_here(handler, self._budget.of_client(caller.share))

    def _reading_here(self, handler: _Handler, budget: MemoryBudget) -> _Handler:
        """A handler of streams that reads the messages and calls `handler`: only those start before a message is read.

        The one message of a call is counted in the budget. A malformed message becomes _Refused.
        """
        act: Any = handler.unary_unary or handler.unary_stream or handler.stream_stream

        async def messages(context: _Context) -> AsyncIterator[Any]:
            while (message := await self._arrived(context)) is not grpc.aio.EOF:
                yield message

        async def asked(context: _Context) -> object:
            if handler.request_streaming:
                return messages(context)
            reservation = Reservation(budget).until_end_of(context)
            try:
                data = await self._arrived(context) or b""
                reservation.add(len(data))
            except MemoryBudgetExceeded as error:
                return _Refused(error)
            return _parse(handler, data)

        async def answer(_: object, context: _Context) -> Any:
            with self._connections.call(context.peer()):
                return await act(await asked(context), context)

        async def answers(_: object, context: _Context) -> AsyncIterator[Any]:
            with self._connections.call(context.peer()):
                async with aclosing(act(await asked(context), context)) as stream:
                    async for one in stream:
                        yield one

        read = partial(_parse, handler) if handler.request_streaming else bytes
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answers, read, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, read, handler.response_serializer)

    def _caller(self, metadata: dict[str, Any]) -> Caller | None:
        proposed = metadata.get("x-request-id")
        request_id = request_id_from(proposed if isinstance(proposed, str) else None)
        if self._api_keys.is_open:
            return Caller(ANONYMOUS, request_id)
        kind, _, secret = str(metadata.get("authorization", "")).partition(" ")
        key = self._api_keys.find(secret.strip()) if kind.lower() == "bearer" else None
        return None if key is None else Caller(key.client, request_id, key.quota)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Ends the call. It reads no message, because a compressed one can become a thousand times larger."""
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid API key is required: authorization: Bearer TOKEN")


class _Refused:
    """Replaces a request that was not parsed. The servicer gets the error when it reads the field."""

    request_id = ""

    def __init__(self, error: Exception | None = None) -> None:
        """Without `error`: the bytes are not a message."""
        self._error = error

    def ByteSize(self) -> int:  # noqa: N802 - like a message
        """Nothing is kept of it."""
        return 0

    @property
    def submission(self) -> NoReturn:
        """Raises the error."""
        raise self._error or _unreadable("submission")

    @property
    def code(self) -> NoReturn:
        """Raises the error."""
        raise self._error or _unreadable("code")


def _unreadable(field: str) -> InvalidMessage:
    return InvalidMessage(f"{field}: the request is not a message of this service, or a text is not UTF-8")


def _parse(handler: _Handler, data: bytes) -> object:
    read: Any = handler.request_deserializer
    if len(data) > _FEW_FIELDS_BYTES and has_more_fields(data, read.__self__.DESCRIPTOR, MOST_FIELDS):
        return _Refused(InvalidMessage(f"the request has more than {MOST_FIELDS:,} fields"))
    try:
        return read(data)
    except DecodeError:
        return _Refused()


# The fields of a message, counted before it is parsed.

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def has_more_fields(data: bytes, message: Descriptor, most: int) -> bool:
    """Whether the bytes of a message have more than `most` fields, with those of the messages inside it.

    Counts up to where the bytes are no message, because parsing stops there too.
    """
    inside = {field.number: field.message_type for field in message.fields}
    pending = [(0, len(data), inside)]
    known = {message.full_name: inside}
    count = 0
    while pending:
        at, end, inside = pending.pop()
        while at < end:
            count += 1
            if count > most:
                return True
            tag, at = _varint(data, at, end)
            kind = tag & 7
            if kind == _BYTES:
                size, at = _varint(data, at, end)
                nested = inside.get(tag >> 3)
                if size and nested is not None and at + size <= end:
                    if nested.full_name not in known:
                        known[nested.full_name] = {field.number: field.message_type for field in nested.fields}
                    pending.append((at + size, end, inside))
                    end, inside = at + size, known[nested.full_name]
                else:
                    at += size
            elif kind == _VARINT:
                _, at = _varint(data, at, end)
            else:
                at += _FIXED_BYTES.get(kind, 0)
    return False


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at a place, and the place after it; the end for one that is cut off."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, max(end, at)
