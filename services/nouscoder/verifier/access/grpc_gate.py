"""gRPC interceptor that handles request id, API key and malformed messages of every call.

Health and reflection need no key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.rpc.faults import InvalidMessage
from nouscoder.rpc.status_codes import rebuilt
from nouscoder.verifier.access.caller import ANONYMOUS, Caller, request_id_from, set_caller

_OPEN = ("/grpc.health.v1.", "/grpc.reflection.")
if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]


class GrpcGate(grpc.aio.ServerInterceptor):
    """Sets the caller of each call. Answers UNAUTHENTICATED if keys are configured and the call has no valid one."""

    def __init__(self, api_keys: ApiKeys) -> None:
        self._api_keys = api_keys

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
        return _tolerant(handler)

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


class _Unreadable:
    """Replaces a request that cannot be parsed. The servicer gets InvalidMessage when it reads its field."""

    request_id = ""

    def ByteSize(self) -> int:  # noqa: N802 - like a message
        """Nothing is kept of it."""
        return 0

    @property
    def submission(self) -> NoReturn:
        """Raises InvalidMessage."""
        raise InvalidMessage("submission: the request is not a message of this service, or a text is not UTF-8")

    @property
    def code(self) -> NoReturn:
        """Raises InvalidMessage."""
        raise InvalidMessage("code: the request is not a message of this service, or a text is not UTF-8")


def _tolerant(handler: _Handler) -> _Handler:
    """`handler` with a deserializer that accepts malformed bytes."""
    read: Any = handler.request_deserializer

    def deserialize(data: bytes) -> object:
        try:
            return read(data)
        except DecodeError:
            return _Unreadable()

    act: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return rebuilt(handler, act, deserialize)
