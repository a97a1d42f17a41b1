"""A gRPC call that ends with an error keeps nothing of its request, which may have 64 MiB."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import grpc
import pytest

from nouscoder.http_server.api_keys import open_api_keys
from nouscoder.http_server.memory_budget import MemoryBudget, MemoryBudgetExceeded
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.v1.verifier_pb2 import GradeRequest, GradeResponse
from nouscoder.verifier.access.grpc_gate import GrpcGate

NAME = "test.Service"
LARGE_CHARS = 1 << 20


async def unary(request: GradeRequest, context: Any) -> GradeResponse:
    raise MemoryBudgetExceeded


async def stream(request: GradeRequest, context: Any) -> AsyncIterator[GradeResponse]:
    yield GradeResponse()
    raise MemoryBudgetExceeded


class Handler(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> Any:
        forms = (GradeRequest.FromString, GradeResponse.SerializeToString)
        return {
            f"/{NAME}/Unary": grpc.unary_unary_rpc_method_handler(unary, *forms),
            f"/{NAME}/Stream": grpc.unary_stream_rpc_method_handler(stream, *forms),
        }.get(str(details.method))


def frames_with_a_large_request() -> list[str]:
    """The functions whose frames still exist and hold it."""
    frames = [one for one in gc.get_objects() if type(one) is FrameType]  # isinstance() would ask each object
    return [one.f_code.co_qualname for one in frames if any(map(_is_large, one.f_locals.values()))]


def _is_large(value: object) -> bool:
    if isinstance(value, GradeRequest):
        return len(value.submission.code) >= LARGE_CHARS
    return isinstance(value, bytes) and len(value) >= LARGE_CHARS


@pytest.mark.parametrize("method", ["Unary", "Stream"])
async def test_frames_of_an_aborted_call_hold_no_request(method: str) -> None:
    errors = StatusCodes({MemoryBudgetExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED}, [NAME])
    server = grpc.aio.server(interceptors=[GrpcGate(open_api_keys(""), MemoryBudget(1 << 30)), errors])
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()  # frames of earlier tests, which hold large requests of their own
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = getattr(channel, "unary_unary" if method == "Unary" else "unary_stream")(f"/{NAME}/{method}")
            message = GradeRequest()
            message.submission.code = LARGE_CHARS * "x"
            with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
                await _all(call(message.SerializeToString()))
            del message
        await server.stop(None)
        assert frames_with_a_large_request() == []
    finally:
        gc.enable()


async def _all(call: Any) -> None:
    if not hasattr(call, "__aiter__"):
        await call
        return
    async for _ in call:
        pass
