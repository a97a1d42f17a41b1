"""Status codes: one interceptor for all methods of a service.

Handlers raise the errors of their service. The service passes a table from error classes to gRPC status codes; an error
gets the code of its nearest class in the table. An error that is not in the table is a defect: gRPC logs it and sends
UNKNOWN.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import grpc

from nouscoder.rpc.convert import InvalidMessage

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Context = grpc.aio.ServicerContext[Any, Any]

# The user agent of a client that asks for one run begins with this and the run's name.
RUN_AGENT = "nouscoder-run/"
# Names the class of the error. Errors of the connection, which gRPC makes itself, have no such trailer.
ERROR_TRAILER = "error"

StatusTable = Mapping[type[Exception], grpc.StatusCode]


@runtime_checkable
class RetryLater(Protocol):
    """An error that says after how many seconds the same call may succeed; sent as the trailer `retry-after`."""

    retry_after_s: int


class StatusCodes(grpc.aio.ServerInterceptor):
    """Ends a call with the status code of the error that its handler raised, for the services in `full_names`.

    With a `run` it ends calls of clients that ask for another run: UNAVAILABLE, because the service may serve that run
    soon.
    """

    def __init__(self, table: StatusTable, full_names: Sequence[str], run: str = "") -> None:
        self._run = run
        self._table: dict[type[Exception], grpc.StatusCode] = {
            InvalidMessage: grpc.StatusCode.INVALID_ARGUMENT,
            **table,
        }
        self._prefixes = tuple(f"/{name}/" for name in full_names)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The handler of this call, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None or not str(handler_call_details.method).startswith(self._prefixes):
            return handler
        agent = dict(handler_call_details.invocation_metadata or ()).get("user-agent", "")
        asked = str(agent).partition(" ")[0].removeprefix(RUN_AGENT) if str(agent).startswith(RUN_AGENT) else ""
        if self._run and asked not in ("", self._run):
            return rebuilt(handler, _refusing(f"the run {self._run} is served here, not {asked}"))
        return self._wrapped(handler)

    def _wrapped(self, handler: _Handler) -> _Handler:
        act: Any = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream

        async def answer(request: Any, context: _Context) -> Any:
            try:
                return await act(request, context)
            except Exception as error:
                ending = self._ending(error)
            del request  # gRPC keeps this frame until a garbage collection
            return await context.abort(*ending)

        async def answers(request: Any, context: _Context) -> AsyncIterator[Any]:
            stream = act(request, context)
            try:
                async with aclosing(stream):
                    async for one in stream:
                        yield one
            except Exception as error:
                ending = self._ending(error)
            else:
                return
            del request, stream
            await context.abort(*ending)

        return rebuilt(handler, answers if handler.response_streaming else answer)

    def _ending(self, error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
        """Code, message and trailers. Raises `error` when it is not in the table."""
        # The nearest class of the error in the table.
        code = next((self._table[kind] for kind in type(error).__mro__ if kind in self._table), None)
        if code is None:
            raise error
        trailer = [(ERROR_TRAILER, type(error).__name__)]
        if isinstance(error, RetryLater):
            trailer.append(("retry-after", str(error.retry_after_s)))
        return code, str(error), tuple(trailer)


def _refusing(message: str) -> Callable[[Any, _Context], Awaitable[None]]:
    async def refuse(request: Any, context: _Context) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, message, ((ERROR_TRAILER, "OtherRun"),))

    return refuse


def rebuilt(handler: _Handler, act: Callable[..., Any]) -> _Handler:
    """A handler of the same kind as `handler` that calls `act`."""
    makers: dict[tuple[bool, bool], Callable[..., _Handler]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[handler.request_streaming, handler.response_streaming]
    return make(act, handler.request_deserializer, handler.response_serializer)
