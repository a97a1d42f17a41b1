"""Client of the verifier over gRPC, for evaluations and environments; other programs use nouscoder.client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from nouscoder.config import Config
from nouscoder.domain.conversation import InterpreterAnswer
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict
from nouscoder.errors import Unusable
from nouscoder.retry import Retry
from nouscoder.rpc.channel import PeerBusy, PeerUnreachable, ServiceClient, peer_error
from nouscoder.rpc.pairs import ANSWER, SUBMISSION, VERDICT
from nouscoder.rpc.tls import ChannelTls, Renewed
from nouscoder.v1 import verifier_pb2, verifier_pb2_grpc

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


_CAPABILITIES_LIMIT_S = 10.0
_GRADE_LIMIT_S = 600.0


class VerifierClient(ServiceClient["verifier_pb2_grpc.VerifierServiceAsyncStub"]):
    """Grades submissions. `token` gives, at each call, the token for a verifier with a tokens_file."""

    def __init__(
        self,
        address: str,
        patience_s: float = 60.0,
        credentials: ChannelTls | None = None,
        token: Callable[[], str] | None = None,
    ) -> None:
        super().__init__("verifier", verifier_pb2_grpc.VerifierServiceStub, address, patience_s, credentials)
        self._token = token
        self._while_full = Retry(f"{self.name}: full queue", (PeerBusy,), for_s=patience_s, max_wait_s=0.5)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        token = self._token() if self._token is not None else ""
        return (("authorization", f"Bearer {token}"),) if token else ()

    async def grade(self, submission: Submission) -> Verdict:
        """The verdict. Waits while the verifier is unreachable or full. Raises PeerUnreachable, PeerBusy, PeerError."""
        request = verifier_pb2.GradeRequest(submission=SUBMISSION.to(submission))
        answer = await self._while_full.call(
            lambda: self._call(lambda: self._stub.Grade(request, timeout=_GRADE_LIMIT_S, metadata=self._metadata()))
        )
        return VERDICT.of(answer.verdict)

    async def languages(self) -> frozenset[str]:
        """The languages that can be graded. Waits while the verifier is unreachable. Raises PeerError."""
        answer: verifier_pb2.CapabilitiesResponse = await self._call(
            lambda: self._stub.Capabilities(
                verifier_pb2.CapabilitiesRequest(), timeout=_CAPABILITIES_LIMIT_S, metadata=self._metadata()
            )
        )
        return frozenset(answer.languages)

    @asynccontextmanager
    async def interpreter(self) -> AsyncIterator[InterpreterCalls]:
        """A tool session, which begins with its first call. Leaving the context ends it."""
        calls = InterpreterCalls(self.name, lambda: self._stub.Interpret(metadata=self._metadata()))
        try:
            yield calls
        finally:
            calls.close()


def verifier_token(config: Config) -> Callable[[], str] | None:
    """The token that a run sends to its verifier, read again when its file changes; None when none is configured.

    Raises Unusable.
    """
    name = config.run.verifier_token_file
    if not name:
        return None

    def read() -> str:
        try:
            return Path(name).read_text(encoding="utf-8-sig").strip()
        except OSError as error:
            raise Unusable(f"run.verifier_token_file cannot be read: {error.strerror}") from error

    return Renewed([name], read).current
