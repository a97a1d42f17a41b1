"""A tool session of the verifier, from its client's side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from nouscoder.domain.interpreter import InterpreterAnswer
from nouscoder.rpc.channel import PeerUnreachable, peer_error
from nouscoder.rpc.pairs import ANSWER
from nouscoder.v1 import verifier_pb2

if TYPE_CHECKING:
    Stream = grpc.aio.StreamStreamCall[verifier_pb2.InterpretRequest, verifier_pb2.InterpretResponse]

# What gRPC says when the service ends the call during a write. The service's own status is lost.
_WRITE_FAILED = "Internal error from Core"


class InterpreterCalls:
    """Calls of one interpreter, one at a time. The session begins with the first of them.

    After an error the session is over: its state cannot be had again.
    """

    def __init__(self, name: str, start: Callable[[], Stream]) -> None:
        self._name = name
        self._start = start
        self._stream: Stream | None = None

    def close(self) -> None:
        """End the session."""
        if self._stream is not None:
            self._stream.cancel()

    async def run(self, code: str) -> InterpreterAnswer:
        """Run `code` after all code before. Raises PeerError; PeerUnreachable when the session ends meanwhile."""
        stream = self._stream = self._stream or self._start()
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # the session is over; reading says why
                await stream.write(verifier_pb2.InterpretRequest(code=code))
            answer = await stream.read()
        except grpc.aio.AioRpcError as error:
            if error.details() == _WRITE_FAILED:
                raise PeerUnreachable(f"{self._name} ended the session while code was sent") from error
            raise peer_error(self._name, error) from error
        if not isinstance(answer, verifier_pb2.InterpretResponse):
            raise PeerUnreachable(f"{self._name} ended the session")
        return ANSWER.of(answer)
