"""What the process that watches a run asks of generation and learner, in domain words."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import grpc

from nouscoder.rpc.channel import call_with_patience, open_channel
from nouscoder.v1 import generation_pb2, generation_pb2_grpc, learner_pb2, learner_pb2_grpc


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """What the learner is doing; see LearnerServiceStatusResponse."""

    step: int
    total_steps: int
    policy_version: int
    state: str
    reward_mean: float
    pass_rate: float
    staleness_mean: float
    staleness_max: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class GenerationStatus:
    """What the engine is doing; see GenerationServiceStatusResponse. `policy_version` is None without weights."""

    policy_version: int | None
    running_rollouts: int
    num_tokens: int


class LearnerClient:
    """A channel to a learner. Raises PeerUnreachable when it does not answer in time."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channel = open_channel(address, credentials)
        self._stub = learner_pb2_grpc.LearnerServiceStub(self._channel)

    async def status(self, timeout_s: float = 2.0) -> LearnerStatus:
        """What it is doing now."""
        request = learner_pb2.LearnerServiceStatusRequest()
        answer = await call_with_patience("learner", lambda: self._stub.Status(request, timeout=timeout_s), 0.0)
        return LearnerStatus(
            answer.step,
            answer.total_steps,
            answer.policy_version,
            answer.state,
            answer.reward_mean,
            answer.pass_rate,
            answer.staleness_mean,
            answer.staleness_max,
            answer.tokens_per_second,
        )

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class GenerationClient:
    """A channel to a generation service."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channel = open_channel(address, credentials)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def status(self, patience_s: float = 0.0, timeout_s: float = 2.0) -> GenerationStatus:
        """What it is doing now. Raises PeerUnreachable after `patience_s` without an answer."""
        request = generation_pb2.GenerationServiceStatusRequest()
        answer = await call_with_patience(
            "generation", lambda: self._stub.Status(request, timeout=timeout_s), patience_s
        )
        version = answer.policy_version if answer.has_policy else None
        return GenerationStatus(version, answer.running_rollouts, answer.num_tokens)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class Watcher:
    """Both clients, closed together."""

    def __init__(
        self, generation_address: str, learner_address: str, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self.generation = GenerationClient(generation_address, credentials)
        self.learner = LearnerClient(learner_address, credentials)

    async def __aenter__(self) -> Watcher:
        """Nothing to open: channels connect on first use."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close both channels."""
        await self.generation.close()
        await self.learner.close()
