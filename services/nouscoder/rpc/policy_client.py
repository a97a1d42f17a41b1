"""Client of the learner for a service that shares no disk with it: fetches policies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from nouscoder.domain.policy import Shard
from nouscoder.rpc.channel import PeerError, PeerUnreachable, open_channel
from nouscoder.v1 import learner_pb2, learner_pb2_grpc

_LIST_LIMIT_S = 120.0  # the learner reads the files to add up their checksums
_CHUNK_LIMIT_S = 60.0
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class NotKept(PeerError):
    """The learner has no such file, or not any more."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the first policy's folder, as the learner has it."""

    name: str
    sha256: str
    num_bytes: int


class PolicyClient:
    """A channel to a learner. Every method raises PeerUnreachable, NotKept or PeerError; none waits for long."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._name = f"learner at {address}"
        self._address = address
        self._credentials = credentials

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._address, self._credentials)
        self._stub: learner_pb2_grpc.LearnerServiceAsyncStub = learner_pb2_grpc.LearnerServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def first_files(self) -> list[RemoteFile]:
        """The files of the policy that the run began with."""
        try:
            answer = await self._stub.ListPolicyFiles(learner_pb2.ListPolicyFilesRequest(), timeout=_LIST_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            raise self._mapped(error) from error
        return [RemoteFile(file.name, file.sha256, file.num_bytes) for file in answer.files]

    def first_file(self, name: str) -> AsyncIterator[bytes]:
        """One of them, in pieces."""
        return self._pieces(self._stub.FetchPolicyFile(learner_pb2.FetchPolicyFileRequest(name=name)))

    def shard(self, policy_version: int, shard: Shard) -> AsyncIterator[bytes]:
        """A shard of a published policy, in pieces."""
        request = learner_pb2.FetchPolicyRequest(policy_version=policy_version, name=shard.name, sha256=shard.sha256)
        return self._pieces(self._stub.FetchPolicy(request))

    async def _pieces(self, call: Any) -> AsyncIterator[bytes]:
        try:
            while (answer := await asyncio.wait_for(call.read(), _CHUNK_LIMIT_S)) is not grpc.aio.EOF:
                yield answer.data
        except TimeoutError as error:
            raise PeerUnreachable(f"{self._name} sent nothing for {_CHUNK_LIMIT_S:.0f} s") from error
        except grpc.aio.AioRpcError as error:
            raise self._mapped(error) from error
        finally:
            call.cancel()

    def _mapped(self, error: grpc.aio.AioRpcError) -> PeerError:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return NotKept(f"{self._name}: {error.details()}")
        kind = PeerUnreachable if error.code() in _AWAY else PeerError
        return kind(f"{self._name}: {error.code().name}: {error.details()}")
