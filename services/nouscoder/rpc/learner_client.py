"""Client of the learner: its state, and the policies that it serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from nouscoder.domain.policy import PolicyFile, Rendezvous, Shard, WeightTransfer
from nouscoder.rpc.channel import PeerError, ServiceClient
from nouscoder.rpc.convert import WirePair
from nouscoder.rpc.tls import ChannelTls
from nouscoder.v1 import learner_pb2, learner_pb2_grpc

_STATUS_LIMIT_S = 2.0
_LIST_LIMIT_S = 120.0  # the learner reads the files to compute their checksums
_SILENCE_LIMIT_S = 60.0
_SEND_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """What the learner is doing; see LearnerServiceStatusResponse."""

    step: int
    total_steps: int
    policy_version: int
    state: str
    state_s: float
    reward_mean: float
    pass_rate: float
    staleness_mean: float
    staleness_max: float
    loss: float
    tokens_per_second: float


_STATUS = WirePair(LearnerStatus, learner_pb2.LearnerServiceStatusResponse)
_FILE = WirePair(PolicyFile, learner_pb2.PolicyFile)


class LearnerClient(ServiceClient["learner_pb2_grpc.LearnerServiceAsyncStub"]):
    """Every method makes one attempt. It raises PeerError, and PeerUnreachable when the learner does not answer."""

    def __init__(self, address: str, credentials: ChannelTls | None = None, run: str = "") -> None:
        super().__init__("learner", learner_pb2_grpc.LearnerServiceStub, address, 0.0, credentials, run)

    async def status(self) -> LearnerStatus:
        """What it is doing now."""
        request = learner_pb2.LearnerServiceStatusRequest()
        answer = await self._call(lambda: self._stub.Status(request, timeout=_STATUS_LIMIT_S))
        return _STATUS.of(answer)

    async def first_files(self) -> list[PolicyFile]:
        """The files of the run's first policy. Raises PeerNotFound while there are none."""
        request = learner_pb2.ListPolicyFilesRequest()
        answer = await self._call(lambda: self._stub.ListPolicyFiles(request, timeout=_LIST_LIMIT_S))
        return [_FILE.of(file) for file in answer.files]

    def first_file(self, name: str) -> AsyncIterator[bytes]:
        """One of them, in pieces. Raises PeerNotFound."""
        return self._pieces(self._stub.FetchPolicyFile(learner_pb2.FetchPolicyFileRequest(name=name)))

    def shard(self, policy_version: int, shard: Shard) -> AsyncIterator[bytes]:
        """A shard of a published policy, in pieces. Raises PeerNotFound when the learner has removed it."""
        request = learner_pb2.FetchPolicyRequest(policy_version=policy_version, name=shard.name, sha256=shard.sha256)
        return self._pieces(self._stub.FetchPolicy(request))

    async def keep_checkpoint(self, from_version: int, silence_limit_s: float) -> AsyncGenerator[tuple[int, str], None]:
        """Have a checkpoint kept after the first batch that makes this policy version or a later one.

        Yields the version in it and "" when its state is copied, and the version and its folder when it is complete.
        """
        call = self._stub.KeepCheckpoint(learner_pb2.KeepCheckpointRequest(from_version=from_version))
        async for answer in self._stream(call, silence_limit_s):
            yield answer.policy_version, answer.path

    async def send_policy(
        self, policy_version: int, digest: str, num_receivers: int, base_digest: str = ""
    ) -> Rendezvous:
        """Begin a transfer from the learner's memory. Raises PeerNotFound and PeerBusy when only the files will do.

        `base_digest` names the policy that the receivers hold in memory, so that the changes may be enough.
        """
        request = learner_pb2.SendPolicyRequest(
            policy_version=policy_version, digest=digest, num_receivers=num_receivers, base_digest=base_digest
        )
        answer = await self._call(lambda: self._stub.SendPolicy(request, timeout=_SEND_LIMIT_S))
        try:
            transfer = WeightTransfer(answer.transfer)
        except ValueError as error:
            raise PeerError(f"{self.name} sends by {answer.transfer!r}, which is not known here") from error
        return Rendezvous(answer.host, answer.port, 1 + num_receivers, transfer, answer.changes)

    async def _pieces(self, call: Any) -> AsyncIterator[bytes]:
        async for answer in self._stream(call, _SILENCE_LIMIT_S):
            yield answer.data
