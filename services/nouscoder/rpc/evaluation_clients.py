"""What an evaluation asks of generation and verifier, in domain words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import grpc

from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict
from nouscoder.rpc.channel import PeerError, PeerUnreachable, call_with_patience, open_channel
from nouscoder.rpc.policy_convert import manifest_to
from nouscoder.rpc.rollout_convert import task_to
from nouscoder.rpc.verdict_convert import submission_to, verdict_from
from nouscoder.store.rollout_record import decode_rollout
from nouscoder.v1 import generation_pb2, generation_pb2_grpc, verifier_pb2, verifier_pb2_grpc

_GRADE_LIMIT_S = 600.0
_STATUS_LIMIT_S = 10.0
_START_LIMIT_S = 120.0
# It may have to fetch the weights from the learner, and the learner may be away.
_POLICY_LIMIT_S = 1800.0
_BUSY_RETRY_S = 0.5
# A service that starts again has no policy for a moment; one that is going down cancels its calls.
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.FAILED_PRECONDITION)


class SamplingClient:
    """Samples rollouts on a generation service."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._address = address
        self._credentials = credentials

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._address, self._credentials)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def use_policy(self, manifest: PolicyManifest) -> None:
        """Have this policy sampled from on this very channel: behind one address may be several services.

        Raises PeerUnreachable when none answers in time, PeerError when the policy is refused.
        """
        name = f"generation at {self._address}"
        status = await call_with_patience(
            name,
            lambda: self._stub.Status(generation_pb2.GenerationServiceStatusRequest(), timeout=_STATUS_LIMIT_S),
            _START_LIMIT_S,
        )
        if status.has_policy and status.policy_version == manifest.policy_version:
            return
        request = generation_pb2.UpdatePolicyRequest(manifest=manifest_to(manifest))
        await call_with_patience(name, lambda: self._stub.UpdatePolicy(request, timeout=_POLICY_LIMIT_S))

    async def generate(self, tasks: Sequence[Task], stall_limit_s: float) -> AsyncIterator[Rollout]:
        """Each rollout as it ends.

        Raises PeerUnreachable when the service goes away, has no policy, or gives nothing for `stall_limit_s` seconds:
        the tasks not answered may be asked for again. Raises PeerError for anything else.
        """
        name = f"generation at {self._address}"
        request = generation_pb2.GenerateRequest(tasks=[task_to(task) for task in tasks])
        call = self._stub.Generate(request)
        try:
            for _ in tasks:
                answer = await asyncio.wait_for(call.read(), stall_limit_s)
                if not isinstance(answer, generation_pb2.GenerateResponse):  # the end of the stream
                    raise PeerError(f"{name} ended the answer before every rollout was there")
                yield decode_rollout(answer.record)
        except TimeoutError as error:
            raise PeerUnreachable(f"{name} has sampled nothing for {stall_limit_s:.0f} s") from error
        except grpc.aio.AioRpcError as error:
            kind = PeerUnreachable if error.code() in _PASSING else PeerError
            raise kind(f"{name}: {error.code().name}: {error.details()}") from error
        finally:
            call.cancel()


class GradingClient:
    """Grades submissions on a verifier; `token` is shown to one that asks for it."""

    def __init__(
        self,
        address: str,
        patience_s: float = 60.0,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
    ) -> None:
        self._address = address
        self._patience_s = patience_s
        self._credentials = credentials
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._address, self._credentials)
        self._stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def grade(self, submission: Submission) -> Verdict:
        """The verdict. Waits for a verifier that is away or full; raises PeerUnreachable or PeerError."""
        request = verifier_pb2.GradeRequest(submission=submission_to(submission))
        name = f"verifier at {self._address}"
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience_s
        while True:
            try:
                answer = await call_with_patience(
                    name,
                    lambda: self._stub.Grade(request, timeout=_GRADE_LIMIT_S, metadata=self._metadata),
                    self._patience_s,
                )
            except PeerError as error:
                if not _is_full(error) or loop.time() > end:
                    raise
            else:
                return verdict_from(answer.verdict)
            await asyncio.sleep(_BUSY_RETRY_S)


def _is_full(error: PeerError) -> bool:
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
