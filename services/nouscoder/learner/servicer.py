"""The gRPC API of the learner: each call converts its request, calls the worker, and converts the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from functools import partial
from typing import BinaryIO

import grpc

from nouscoder.errors import NousCoderError
from nouscoder.learner.publication.policy_files import NoSuchPolicyFile, PolicyFiles, chunks
from nouscoder.learner.publication.sender import NotInMemory, PolicySender, TooManyTransfers
from nouscoder.learner.worker import LearnerWorker
from nouscoder.v1 import learner_pb2 as v1
from nouscoder.v1 import learner_pb2_grpc

_Context = grpc.aio.ServicerContext[object, object]

FULL_NAME = v1.DESCRIPTOR.services_by_name["LearnerService"].full_name

STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    NousCoderError: grpc.StatusCode.FAILED_PRECONDITION,
    NoSuchPolicyFile: grpc.StatusCode.NOT_FOUND,
    NotInMemory: grpc.StatusCode.NOT_FOUND,
    TooManyTransfers: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OSError: grpc.StatusCode.NOT_FOUND,  # a policy file was pruned in the meantime
}


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """The calls of learner.proto. Each converts the request, calls the worker, and converts the answer."""

    def __init__(
        self, worker: LearnerWorker, total_steps: int, policy_files: PolicyFiles, sender: PolicySender
    ) -> None:
        self._worker = worker
        self._total_steps = total_steps
        self._policy_files = policy_files
        self._sender = sender

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Have `server` answer the calls of learner.proto."""
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(self, server)

    async def Status(
        self, request: v1.LearnerServiceStatusRequest, context: _Context
    ) -> v1.LearnerServiceStatusResponse:
        status = self._worker.status()
        answer = v1.LearnerServiceStatusResponse(
            step=status.step,
            total_steps=self._total_steps,
            policy_version=status.policy_version,
            state=status.state.value,
            state_s=status.state_s,
        )
        if status.last is not None:
            figures = status.last.statistics
            answer.reward_mean = figures.reward_mean
            answer.pass_rate = figures.pass_rate
            answer.staleness_mean = figures.staleness_mean
            answer.staleness_max = figures.staleness_max
            answer.loss = status.last.steps[-1].loss
            answer.tokens_per_second = status.last.tokens_per_second
        return answer

    async def Pause(self, request: v1.LearnerServicePauseRequest, context: _Context) -> v1.LearnerServicePauseResponse:
        self._worker.pause()
        return v1.LearnerServicePauseResponse()

    async def Resume(
        self, request: v1.LearnerServiceResumeRequest, context: _Context
    ) -> v1.LearnerServiceResumeResponse:
        self._worker.resume()
        return v1.LearnerServiceResumeResponse()

    async def Checkpoint(
        self, request: v1.LearnerServiceCheckpointRequest, context: _Context
    ) -> v1.LearnerServiceCheckpointResponse:
        """Write a checkpoint after the steps of the batch in training, because checkpoints hold whole batches."""
        path, step = await self._worker.checkpoint()
        return v1.LearnerServiceCheckpointResponse(path=str(path), step=step)

    async def KeepCheckpoint(
        self, request: v1.KeepCheckpointRequest, context: _Context
    ) -> AsyncIterator[v1.KeepCheckpointResponse]:
        kept = await self._worker.checkpoints.keep(request.from_version)  # the caller bounds the wait
        yield v1.KeepCheckpointResponse(policy_version=kept.policy_version)
        path = await kept.path()
        yield v1.KeepCheckpointResponse(policy_version=kept.policy_version, path=str(path))

    async def ListPolicyFiles(
        self, request: v1.ListPolicyFilesRequest, context: _Context
    ) -> v1.ListPolicyFilesResponse:
        """The files of the first policy; NOT_FOUND while there are none."""
        files = await asyncio.to_thread(self._policy_files.first)
        named = [v1.PolicyFile(name=f.name, sha256=f.sha256, num_bytes=f.num_bytes) for f in files]
        return v1.ListPolicyFilesResponse(files=named)

    async def FetchPolicyFile(
        self, request: v1.FetchPolicyFileRequest, context: _Context
    ) -> AsyncIterator[v1.FetchPolicyFileResponse]:
        async for data in _pieces(partial(self._policy_files.open_first, request.name)):
            yield v1.FetchPolicyFileResponse(data=data)

    async def FetchPolicy(
        self, request: v1.FetchPolicyRequest, context: _Context
    ) -> AsyncIterator[v1.FetchPolicyResponse]:
        wanted = partial(self._policy_files.open_published, request.policy_version, request.name, request.sha256)
        async for data in _pieces(wanted):
            yield v1.FetchPolicyResponse(data=data)

    async def SendPolicy(self, request: v1.SendPolicyRequest, context: _Context) -> v1.SendPolicyResponse:
        rendezvous = await asyncio.to_thread(
            self._sender.begin, request.policy_version, request.digest, request.num_receivers, request.base_digest
        )
        return v1.SendPolicyResponse(
            host=rendezvous.host, port=rendezvous.port, transfer=rendezvous.transfer.value, changes=rendezvous.changes
        )


async def _pieces(open_file: Callable[[], BinaryIO]) -> AsyncIterator[bytes]:
    """The contents of the file that `open_file` opens, in pieces, read outside the event loop."""
    with closing(chunks(await asyncio.to_thread(open_file))) as pieces:
        while data := await asyncio.to_thread(next, pieces, b""):
            yield data
