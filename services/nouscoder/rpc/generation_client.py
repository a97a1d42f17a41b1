"""Client of the generation service: its state, its policy, and rollouts for an evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import grpc

from nouscoder.domain.policy import PolicyManifest
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.rpc.channel import PeerError, PeerRefused, ServiceClient
from nouscoder.rpc.convert import WirePair
from nouscoder.rpc.pairs import MANIFEST, TASK
from nouscoder.rpc.tls import ChannelTls
from nouscoder.store.rollout_record import decode_rollout
from nouscoder.v1 import generation_pb2, generation_pb2_grpc

_STATUS_LIMIT_S = 2.0
# vLLM loads and compiles for minutes before it answers. A service that has died is noticed by others.
_START_LIMIT_S = 1800.0
# The service may have to wait for the learner, to fetch the weights from it.
_POLICY_LIMIT_S = 1800.0
_PAUSE_CALL_LIMIT_S = 60.0
# A worker that leaves its run waits a few seconds for a broker that has ended.
_NEXT_RUN_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class GenerationStatus:
    """What the engine is doing; see GenerationServiceStatusResponse. `policy_version` is None without weights.

    `idle_s`: seconds without decoding since the start.
    """

    policy_version: int | None
    running_rollouts: int
    num_tokens: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep this version in use until a call has ended, but for `limit_s` seconds at most."""

    policy_version: int
    limit_s: float


_PIN = WirePair(Pin, generation_pb2.Pin)


class PolicyReplaced(PeerRefused):
    """The service samples from another policy than the one that was asked for, so from a newer one."""


class GenerationClient(ServiceClient["generation_pb2_grpc.GenerationServiceAsyncStub"]):
    """Every method raises PeerError."""

    def __init__(
        self, address: str, patience_s: float = 60.0, credentials: ChannelTls | None = None, run: str = ""
    ) -> None:
        super().__init__("generation", generation_pb2_grpc.GenerationServiceStub, address, patience_s, credentials, run)

    async def status(self, patience_s: float | None = None) -> GenerationStatus:
        """What it is doing now. Raises PeerUnreachable when it does not answer in time."""
        request = generation_pb2.GenerationServiceStatusRequest()
        answer = await self._call(lambda: self._stub.Status(request, timeout=_STATUS_LIMIT_S), patience_s)
        version = answer.policy_version if answer.has_policy else None
        return GenerationStatus(version, answer.running_rollouts, answer.num_tokens, answer.idle_s)

    async def use_policy(self, manifest: PolicyManifest, *, older: bool = False) -> None:
        """Make the service behind this channel sample from this policy (an address may lead to several services).

        With `older`, after the training, also from one older than that in use. Raises PeerUnreachable when it does not
        answer in time, PolicyReplaced when it uses a newer one already, and PeerRefused when it refuses the policy.
        """
        if (await self.status(_START_LIMIT_S)).policy_version == manifest.policy_version:
            return
        request = generation_pb2.UpdatePolicyRequest(manifest=MANIFEST.to(manifest), older=older)
        with _replaced():
            await self._call(lambda: self._stub.UpdatePolicy(request, timeout=_POLICY_LIMIT_S))

    async def pause(self, limit_s: float) -> None:
        """Stop decoding for at most `limit_s` seconds. Running rollouts are kept."""
        request = generation_pb2.GenerationServicePauseRequest(limit_s=limit_s)
        await self._call(lambda: self._stub.Pause(request, timeout=_PAUSE_CALL_LIMIT_S))

    async def resume(self) -> None:
        """End a pause."""
        request = generation_pb2.GenerationServiceResumeRequest()
        await self._call(lambda: self._stub.Resume(request, timeout=_PAUSE_CALL_LIMIT_S))

    async def serve_next_run(self) -> str:
        """Have it leave its run and serve the one in its configuration file, with the same engine.

        Returns the name of the run. Raises PeerRefused with the reason when the engine would have to be started again.
        """
        request = generation_pb2.ServeNextRunRequest()
        answer = await self._call(lambda: self._stub.ServeNextRun(request, timeout=_NEXT_RUN_LIMIT_S))
        return answer.run_name

    async def generate(
        self, tasks: Sequence[Task], stall_limit_s: float, pin: Pin | None = None, *, evaluation: bool = False
    ) -> AsyncIterator[Rollout]:
        """Each rollout when it ends. The call is not repeated: call again for the tasks without a rollout.

        `evaluation`: with the context of evaluations, which is that of the training otherwise.

        With `pin` all tokens are from its policy version. Raises PeerUnreachable when the service fails, has no policy
        yet, or sends nothing for `stall_limit_s` seconds, PolicyReplaced when another version than that of the pin is
        in use, and PeerRefused for a task that cannot be sampled.
        """
        missing = len(tasks)
        pinned = None if pin is None else _PIN.to(pin)
        request = generation_pb2.GenerateRequest(tasks=map(TASK.to, tasks), pin=pinned, evaluation=evaluation)
        with _replaced():
            async with aclosing(self._stream(self._stub.Generate(request), stall_limit_s)) as answers:
                async for answer in answers:
                    missing -= 1
                    yield decode_rollout(answer.record)
        if missing:
            raise PeerError(f"{self.name} ended the stream before every rollout was there")


@contextmanager
def _replaced() -> Iterator[None]:
    """Raise PolicyReplaced for FAILED_PRECONDITION, which only the version of a policy causes here."""
    try:
        yield
    except PeerRefused as error:
        cause = error.__cause__
        if isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise PolicyReplaced(str(error)) from error
        raise
