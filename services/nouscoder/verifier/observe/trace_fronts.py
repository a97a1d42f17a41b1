"""The root spans of a trace: one for each grading request of the REST API, and one for each gRPC call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import TYPE_CHECKING, Any

import grpc
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nouscoder.rpc.status_codes import rebuilt
from nouscoder.verifier.observe.tracing import Tracing

if TYPE_CHECKING:
    from nouscoder.verifier.api.rest import GradingApi

    _Handler = grpc.RpcMethodHandler[Any, Any]

_PATHS = frozenset({"/v1/grade", "/v1/grade/stream", "/v1/grade/batch", "/run_code"})
_SERVICE = "/nouscoder.v1.VerifierService/"


def trace_fronts(app: GradingApi, tracing: Tracing | None) -> list[grpc.aio.ServerInterceptor]:
    """Trace the requests to `app`. Returns the interceptors that trace gRPC calls. Does nothing when tracing is off."""
    if tracing is None:
        return []
    app.wrap(TraceRequests, tracing=tracing)
    return [TraceCalls(tracing)]


class TraceRequests:
    """ASGI middleware. It must be the outermost one."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracing.request(f"{scope['method']} {scope['path']}", headers) as span:

            async def record(message: Message) -> None:
                if message["type"] == "http.response.start" and span.is_recording():
                    answered = {bytes(name).lower(): value for name, value in message.get("headers", ())}
                    span.set_attribute("http.response.status_code", message["status"])
                    span.set_attribute("request_id", answered.get(b"x-request-id", b"").decode("latin-1"))
                await send(message)

            await self._app(scope, receive, record)


class TraceCalls(grpc.aio.ServerInterceptor):
    """gRPC interceptor. It must be the first one. It does not trace health and reflection."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Handle one call."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(_SERVICE):
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        headers = {str(key): value for key, value in metadata if isinstance(value, str)}
        return _traced(handler, lambda: self._tracing.request(method, headers))


def _traced(handler: _Handler, begin: Callable[[], AbstractContextManager[object]]) -> _Handler:
    """The same handler, inside a span."""
    inner: Any = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream

    async def one(request: Any, context: Any) -> Any:
        with begin():
            return await inner(request, context)

    async def many(request: Any, context: Any) -> AsyncIterator[Any]:
        with begin():
            async with aclosing(inner(request, context)) as answers:
                async for answer in answers:
                    yield answer

    return rebuilt(handler, many if handler.response_streaming else one)
