"""The broker as a gRPC service. STATUS_CODES maps its errors to status codes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from nouscoder.broker.core import Broker
from nouscoder.broker.errors import (
    Behind,
    BrokerError,
    BrokerUnavailable,
    InvalidRequest,
    InvariantBroken,
    RedisFull,
    Refused,
    UnknownProblem,
)
from nouscoder.rpc import convert, pairs
from nouscoder.v1 import broker_pb2, broker_pb2_grpc

Context = grpc.aio.ServicerContext[object, object]

STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    BrokerUnavailable: grpc.StatusCode.UNAVAILABLE,
    RedisFull: grpc.StatusCode.UNAVAILABLE,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownProblem: grpc.StatusCode.NOT_FOUND,
    Refused: grpc.StatusCode.FAILED_PRECONDITION,
    Behind: grpc.StatusCode.ABORTED,
    InvariantBroken: grpc.StatusCode.DATA_LOSS,
    BrokerError: grpc.StatusCode.INTERNAL,
}
_YIELD_EVERY = 256
log = logging.getLogger(__name__)
FULL_NAME = broker_pb2.DESCRIPTOR.services_by_name["BrokerService"].full_name


class BrokerServicer(broker_pb2_grpc.BrokerServiceServicer):
    """The methods of broker.proto: each converts the request, calls the Broker, and converts the result."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def LeaseTasks(
        self, request: broker_pb2.LeaseTasksRequest, context: Context
    ) -> broker_pb2.LeaseTasksResponse:
        """Leases rollouts to sample."""
        leased = await self._broker.lease_tasks(_worker(request.worker_id), request.max_tasks, request.wait_s)
        return pairs.LEASED_TASKS.to(leased)

    async def SubmitRollouts(
        self, request: broker_pb2.SubmitRolloutsRequest, context: Context
    ) -> broker_pb2.SubmitRolloutsResponse:
        """Takes sampled rollouts."""
        rollouts = [(item.lease_id, item.header, item.record) for item in request.rollouts]
        refused = await self._broker.submit_rollouts(_worker(request.worker_id), rollouts)
        return broker_pb2.SubmitRolloutsResponse(refused_rollout_ids=refused)

    async def KeepPartials(
        self, request: broker_pb2.KeepPartialsRequest, context: Context
    ) -> broker_pb2.KeepPartialsResponse:
        """Keeps pieces of rollouts that are being sampled."""
        pieces = [pairs.PIECE.of(item) for item in request.pieces]
        kept = await self._broker.partials.keep(_worker(request.worker_id), pieces)
        return broker_pb2.KeepPartialsResponse(num_kept_tokens=kept)

    async def ReadPartial(
        self, request: broker_pb2.ReadPartialRequest, context: Context
    ) -> broker_pb2.ReadPartialResponse:
        """Reads the pieces of a rollout."""
        return broker_pb2.ReadPartialResponse(data=await self._broker.partials.read(request.rollout_id))

    async def LeaseGrading(
        self, request: broker_pb2.LeaseGradingRequest, context: Context
    ) -> broker_pb2.LeaseGradingResponse:
        """Leases rollouts to grade."""
        leased = await self._broker.lease_grading(_worker(request.worker_id), request.max_rollouts, request.wait_s)
        return pairs.LEASED_GRADINGS.to(leased)

    async def StreamRecords(
        self, request: broker_pb2.StreamRecordsRequest, context: Context
    ) -> AsyncIterator[broker_pb2.StreamRecordsResponse]:
        """Reads records in chunks."""
        ranges = [pairs.RANGE.of(item) for item in request.ranges]
        async for pieces in self._broker.records.stream(ranges):
            yield broker_pb2.StreamRecordsResponse(
                pieces=[broker_pb2.RecordPiece(range=place, data=data) for place, data in pieces]
            )

    async def FetchTests(
        self, request: broker_pb2.FetchTestsRequest, context: Context
    ) -> AsyncIterator[broker_pb2.FetchTestsResponse]:
        """Streams a file of tests."""
        async for piece in self._broker.read_tests(request.tests_digest):
            yield broker_pb2.FetchTestsResponse(data=piece)

    async def SubmitVerdicts(
        self, request: broker_pb2.SubmitVerdictsRequest, context: Context
    ) -> broker_pb2.SubmitVerdictsResponse:
        """Takes verdicts."""
        verdicts = [(item.lease_id, item.rollout_id, pairs.VERDICT.of(item.verdict)) for item in request.verdicts]
        refused = await self._broker.submit_verdicts(_worker(request.worker_id), verdicts)
        return broker_pb2.SubmitVerdictsResponse(refused_rollout_ids=refused)

    async def LeaseBatch(
        self, request: broker_pb2.LeaseBatchRequest, context: Context
    ) -> broker_pb2.LeaseBatchResponse:
        """Leases the next batch."""
        leased = await self._broker.lease_batch(
            _worker(request.worker_id), request.wait_s, request.run_id, request.batches
        )
        answer = broker_pb2.LeaseBatchResponse(run_finished=leased.run_finished)
        if leased.batch is not None and leased.lease is not None:
            answer.lease.CopyFrom(pairs.LEASE.to(leased.lease))
            answer.batch.batch_id, answer.batch.policy_version = leased.batch.batch_id, leased.batch.policy_version
            if leased.batch.completed is not None:
                answer.batch.completed.CopyFrom(pairs.COMPLETED.to(leased.batch.completed))
            for place, recorded in enumerate(leased.batch.rollouts, 1):
                answer.batch.rollouts.append(pairs.PASSED_ROLLOUT.to(recorded))
                if place % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)  # heartbeats must not wait for a large batch
        return answer

    async def RestoreRun(
        self, request: broker_pb2.RestoreRunRequest, context: Context
    ) -> broker_pb2.RestoreRunResponse:
        """Restores what Redis lost from the learner's state."""
        return pairs.RESTORED.to(await self._broker.restore_run(pairs.TRAINED_STATE.of(request)))

    async def ReadCurriculum(
        self, request: broker_pb2.ReadCurriculumRequest, context: Context
    ) -> broker_pb2.ReadCurriculumResponse:
        """The curriculum's state."""
        state = await self._broker.read_curriculum()
        return broker_pb2.ReadCurriculumResponse(curriculum=pairs.CURRICULUM.to(state), run=self._broker.run)

    async def CommitBatch(
        self, request: broker_pb2.CommitBatchRequest, context: Context
    ) -> broker_pb2.CommitBatchResponse:
        """Marks a batch trained."""
        already = await self._broker.commit_batch(request.batch_id, request.step, request.groups)
        return broker_pb2.CommitBatchResponse(already_committed=already)

    async def PublishPolicy(
        self, request: broker_pb2.PublishPolicyRequest, context: Context
    ) -> broker_pb2.PublishPolicyResponse:
        """Takes a policy."""
        version = await self._broker.publish_policy(pairs.MANIFEST.of(request.manifest))
        return broker_pb2.PublishPolicyResponse(policy_version=version)

    async def WatchPolicy(
        self, request: broker_pb2.WatchPolicyRequest, context: Context
    ) -> AsyncIterator[broker_pb2.WatchPolicyResponse]:
        """Streams the newest policy and each newer one until the drain."""
        async for manifest in self._broker.watch_policy():
            yield broker_pb2.WatchPolicyResponse(manifest=pairs.MANIFEST.to(manifest))

    async def Heartbeat(self, request: broker_pb2.HeartbeatRequest, context: Context) -> broker_pb2.HeartbeatResponse:
        """Extends leases."""
        lost = await self._broker.heartbeat(
            _worker(request.worker_id),
            request.lease_ids,
            request.progress,
            paused=request.paused,
            oldest_versions=[None if version < 0 else version for version in request.oldest_versions],
        )
        return broker_pb2.HeartbeatResponse(lost_lease_ids=lost, reasons=lost.values())

    async def ReleaseLeases(
        self, request: broker_pb2.ReleaseLeasesRequest, context: Context
    ) -> broker_pb2.ReleaseLeasesResponse:
        """Takes back leases of a worker."""
        released = await self._broker.release_leases(
            _worker(request.worker_id), request.lease_ids, request.refused, abandoned=request.abandoned
        )
        if not request.lease_ids:
            log.info("a worker stopped", extra={"worker_id": request.worker_id, "leases_given_back": released})
        return broker_pb2.ReleaseLeasesResponse(released=released)

    async def ReportBatchFailure(
        self, request: broker_pb2.ReportBatchFailureRequest, context: Context
    ) -> broker_pb2.ReportBatchFailureResponse:
        """Notes that a batch could not be trained on."""
        held_back = await self._broker.operations.report_batch_failure(request.batch_id, request.reason)
        return broker_pb2.ReportBatchFailureResponse(held_back=held_back)

    async def DropBatch(self, request: broker_pb2.DropBatchRequest, context: Context) -> broker_pb2.DropBatchResponse:
        """Gives up the uncommitted batch."""
        return broker_pb2.DropBatchResponse(dropped_rollouts=await self._broker.operations.drop_batch(request.batch_id))

    async def SetRunMode(
        self, request: broker_pb2.SetRunModeRequest, context: Context
    ) -> broker_pb2.SetRunModeResponse:
        """Runs, drains or pauses the run."""
        former = await self._broker.operations.set_mode(pairs.MODE[request.mode])
        return broker_pb2.SetRunModeResponse(former=pairs.MODE.of_member[former])

    async def ListDeadLetters(
        self, request: broker_pb2.ListDeadLettersRequest, context: Context
    ) -> broker_pb2.ListDeadLettersResponse:
        """The dead letters."""
        letters = await self._broker.operations.dead_letters(request.max_letters)
        return broker_pb2.ListDeadLettersResponse(letters=map(pairs.DEAD_LETTER.to, letters))

    async def RemoveDeadLetters(
        self, request: broker_pb2.RemoveDeadLettersRequest, context: Context
    ) -> broker_pb2.RemoveDeadLettersResponse:
        """Removes dead letters."""
        removed, problems = await self._broker.operations.remove_dead_letters(
            request.letter_ids, requeue=request.requeue
        )
        return broker_pb2.RemoveDeadLettersResponse(removed=removed, requeued_problem_ids=problems)

    async def FinishRun(self, request: broker_pb2.FinishRunRequest, context: Context) -> broker_pb2.FinishRunResponse:
        """Ends the run."""
        return broker_pb2.FinishRunResponse(ledger=pairs.LEDGER.to(await self._broker.finish_run(request.reason)))

    async def ContinueRun(
        self, request: broker_pb2.ContinueRunRequest, context: Context
    ) -> broker_pb2.ContinueRunResponse:
        """A run that has ended goes on."""
        return broker_pb2.ContinueRunResponse(had_ended=await self._broker.continue_run())

    async def ServeStage(
        self, request: broker_pb2.ServeStageRequest, context: Context
    ) -> broker_pb2.ServeStageResponse:
        """Another stage of the plan is served."""
        await self._broker.serve_stage(request.run_name)
        return broker_pb2.ServeStageResponse()

    async def Status(self, request: broker_pb2.StatusRequest, context: Context) -> broker_pb2.StatusResponse:
        """The run at one instant."""
        return pairs.STATUS.to(await self._broker.status())

    async def WhyStalled(
        self, request: broker_pb2.WhyStalledRequest, context: Context
    ) -> broker_pb2.WhyStalledResponse:
        """What blocks the next step."""
        blockers = await self._broker.why_stalled()
        return broker_pb2.WhyStalledResponse(blockers=map(pairs.BLOCKER.to, blockers))


def add_to_server(broker: Broker, server: grpc.aio.Server) -> None:
    """Have `server` answer the calls of broker.proto with `broker`."""
    broker_pb2_grpc.add_BrokerServiceServicer_to_server(BrokerServicer(broker), server)


def _worker(worker_id: str) -> str:
    """A checked worker id: it becomes the name of a consumer in Redis. Raises InvalidMessage."""
    if not 0 < len(worker_id) <= 200 or worker_id == "released":
        raise convert.InvalidMessage("worker_id must have 1 to 200 characters and not be 'released'")
    return worker_id
