"""The learner as a process: its gRPC service, and the worker that trains on rank 0; what the other ranks do.

When the last batch is committed, the run is finished and `serve` returns; the process exits with code 0. With
learner.serve_after_run it keeps serving policies until SIGTERM. On SIGTERM `serve` returns without waiting for the
batch in training, which is trained again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import BinaryIO

import grpc
from prometheus_client import CollectorRegistry

from nouscoder.config import Config
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.follower import RankFollower
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.parallel.ranks import Ranks
from nouscoder.learner.publication.policy_files import NoSuchPolicyFile, PolicyFiles, chunks
from nouscoder.learner.publication.sender import NotInMemory, PolicySender, TooManyTransfers
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.worker import LearnerWorker
from nouscoder.recorded_evaluations import RecordedEvaluations
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.server import Health, Served, run_until_stopped, start_grpc, stop_event
from nouscoder.rpc.tls import channel_credentials, server_credentials
from nouscoder.rpc.worker_id import sole_worker_id
from nouscoder.v1 import learner_pb2 as v1
from nouscoder.v1 import learner_pb2_grpc

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[object, object]

_FULL_NAME = v1.DESCRIPTOR.services_by_name["LearnerService"].full_name

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


async def serve(config: Config) -> None:
    """Train until the run's batches are done or SIGTERM. Raises NousCoderError with a message of one sentence.

    With learner.serve_after_run it then serves the policies until SIGTERM.
    """
    learner, policy = config.learner, config.in_run_folder(config.policy.path)
    if not policy.exists() and not config.run.folder.exists():
        raise Unusable(f"policy.path: {policy} does not exist; --config names the run's configuration")
    ranks = await asyncio.to_thread(Ranks.join, learner.device, learner.rank_patience_s, learner.context_parallel)
    if ranks.rank:
        # Supervisors signal every rank. Rank 0 decides: it completes its step and tells the others to stop.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        await asyncio.to_thread(RankFollower(config, ranks).run)
        return
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        stop = stop_event()
        client = BrokerClient(
            config.broker.grpc,
            sole_worker_id("learner"),  # the lock on the run folder admits one learner
            patience_s=config.run.peer_patience_s,
            credentials=channel_credentials(config.tls),
            run=config.asked_run,
        )
        broker = await stack.enter_async_context(client)
        sender = PolicySender(config)
        metrics = LearnerMetrics(registry)
        metrics.watch_evaluations(RecordedEvaluations(config.run.folder))
        metrics.watch_storage(Path(config.run.folder))
        worker = LearnerWorker(config, broker, metrics, LearnerCore(config, ranks), sender)
        stack.push_async_callback(worker.stop)
        servicer = LearnerServicer(worker, config.total_steps, PolicyFiles(RunFiles.of(config)), sender)
        served = Served(
            config.learner.grpc,
            config.learner.metrics,
            [_FULL_NAME],
            partial(learner_pb2_grpc.add_LearnerServiceServicer_to_server, servicer),
            registry,
            drain_s=1.0,
            credentials=server_credentials(config.tls),
            status_codes=STATUS_CODES,
            health=Health(config.learner.grpc_health),
            certificates=(config.tls.certificate,),
            run=config.asked_run,
        )
        await start_grpc(served, stack)
        work = _work_and_stay(worker) if config.learner.serve_after_run else worker.run()
        await run_until_stopped(stop, work)


async def _work_and_stay(worker: LearnerWorker) -> None:
    await worker.run()
    log.info("the run is finished: its policies are served until SIGTERM")
    await worker.stay()
