"""The learner as a process: its gRPC service, and the worker that trains.

When the last batch is committed the run is finished and `serve` returns: the process ends with exit code 0. On SIGTERM
it returns as well, without waiting for the batch in training, which is trained again after a restart.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc
from prometheus_client import CollectorRegistry

from nouscoder.config import Config
from nouscoder.errors import NousCoderError
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.metrics import LearnerMetrics
from nouscoder.learner.worker import LearnerWorker
from nouscoder.rpc.broker_client import BrokerClient, new_worker_id
from nouscoder.rpc.server import Served, run_until_stopped, start_grpc, stop_event
from nouscoder.v1 import learner_pb2, learner_pb2_grpc

_FULL_NAME = learner_pb2.DESCRIPTOR.services_by_name["LearnerService"].full_name


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Convert, call, convert."""

    def __init__(self, worker: LearnerWorker, total_steps: int) -> None:
        self._worker = worker
        self._total_steps = total_steps

    async def Status(  # noqa: N802
        self,
        request: learner_pb2.LearnerServiceStatusRequest,
        context: grpc.aio.ServicerContext[
            learner_pb2.LearnerServiceStatusRequest, learner_pb2.LearnerServiceStatusResponse
        ],
    ) -> learner_pb2.LearnerServiceStatusResponse:
        """What it is doing."""
        status = self._worker.status()
        answer = learner_pb2.LearnerServiceStatusResponse(
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

    async def Pause(  # noqa: N802
        self,
        request: learner_pb2.LearnerServicePauseRequest,
        context: grpc.aio.ServicerContext[
            learner_pb2.LearnerServicePauseRequest, learner_pb2.LearnerServicePauseResponse
        ],
    ) -> learner_pb2.LearnerServicePauseResponse:
        """Stop before the next batch."""
        self._worker.pause()
        return learner_pb2.LearnerServicePauseResponse()

    async def Resume(  # noqa: N802
        self,
        request: learner_pb2.LearnerServiceResumeRequest,
        context: grpc.aio.ServicerContext[
            learner_pb2.LearnerServiceResumeRequest, learner_pb2.LearnerServiceResumeResponse
        ],
    ) -> learner_pb2.LearnerServiceResumeResponse:
        """Go on."""
        self._worker.resume()
        return learner_pb2.LearnerServiceResumeResponse()

    async def Checkpoint(  # noqa: N802
        self,
        request: learner_pb2.LearnerServiceCheckpointRequest,
        context: grpc.aio.ServicerContext[
            learner_pb2.LearnerServiceCheckpointRequest, learner_pb2.LearnerServiceCheckpointResponse
        ],
    ) -> learner_pb2.LearnerServiceCheckpointResponse:
        """Write a checkpoint as soon as the running batch's steps are done: checkpoints hold whole batches."""
        try:
            path, step = await self._worker.checkpoint()
        except NousCoderError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return learner_pb2.LearnerServiceCheckpointResponse(path=str(path), step=step)


async def serve(config: Config) -> None:
    """Train until the run's batches are done or SIGTERM. Raises NousCoderError in one sentence."""
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        stop = stop_event()
        broker = await stack.enter_async_context(BrokerClient(config.broker.grpc, new_worker_id("learner")))
        worker = LearnerWorker(config, broker, LearnerMetrics(registry), LearnerCore(config))
        stack.push_async_callback(worker.close)

        def register(server: grpc.aio.Server) -> None:
            learner_pb2_grpc.add_LearnerServiceServicer_to_server(LearnerServicer(worker, config.total_steps), server)

        served = Served(config.learner.grpc, config.learner.metrics, [_FULL_NAME], register, registry, drain_s=1.0)
        await start_grpc(served, stack)
        await run_until_stopped(stop, worker.run())
