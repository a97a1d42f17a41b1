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
from nouscoder.v1 import broker_pb2 as v1
from nouscoder.v1 import broker_pb2_grpc

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
FULL_NAME = v1.DESCRIPTOR.services_by_name["BrokerService"].full_name


class BrokerServicer(broker_pb2_grpc.BrokerServiceServicer):
    """The methods of broker.proto, which says what each does: converts the request, calls the Broker, converts back."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def LeaseTasks(self, request: v1.LeaseTasksRequest, context: Context) -> v1.LeaseTasksResponse:
        leased = await self._broker.lease_tasks(_worker(request.worker_id), request.max_tasks, request.wait_s)
        return pairs.LEASED_TASKS.to(leased)

    async def SubmitRollouts(self, request: v1.SubmitRolloutsRequest, context: Context) -> v1.SubmitRolloutsResponse:
        rollouts = [(item.lease_id, item.header, item.record) for item in request.rollouts]
        refused = await self._broker.submit_rollouts(_worker(request.worker_id), rollouts)
        return v1.SubmitRolloutsResponse(refused_rollout_ids=refused)

    async def KeepPartials(self, request: v1.KeepPartialsRequest, context: Context) -> v1.KeepPartialsResponse:
        pieces = [pairs.PIECE.of(item) for item in request.pieces]
        kept = await self._broker.partials.keep(_worker(request.worker_id), pieces)
        return v1.KeepPartialsResponse(num_kept_tokens=kept)

    async def ReadPartial(self, request: v1.ReadPartialRequest, context: Context) -> v1.ReadPartialResponse:
        return v1.ReadPartialResponse(data=await self._broker.partials.read(request.rollout_id))

    async def LeaseGrading(self, request: v1.LeaseGradingRequest, context: Context) -> v1.LeaseGradingResponse:
        leased = await self._broker.lease_grading(_worker(request.worker_id), request.max_rollouts, request.wait_s)
        return pairs.LEASED_GRADINGS.to(leased)

    async def StreamRecords(
        self, request: v1.StreamRecordsRequest, context: Context
    ) -> AsyncIterator[v1.StreamRecordsResponse]:
        ranges = [pairs.RANGE.of(item) for item in request.ranges]
        async for pieces in self._broker.records.stream(ranges):
            yield v1.StreamRecordsResponse(pieces=[v1.RecordPiece(range=place, data=data) for place, data in pieces])

    async def FetchTests(self, request: v1.FetchTestsRequest, context: Context) -> AsyncIterator[v1.FetchTestsResponse]:
        async for piece in self._broker.read_tests(request.tests_digest):
            yield v1.FetchTestsResponse(data=piece)

    async def SubmitVerdicts(self, request: v1.SubmitVerdictsRequest, context: Context) -> v1.SubmitVerdictsResponse:
        verdicts = [(item.lease_id, item.rollout_id, pairs.VERDICT.of(item.verdict)) for item in request.verdicts]
        refused = await self._broker.submit_verdicts(_worker(request.worker_id), verdicts)
        return v1.SubmitVerdictsResponse(refused_rollout_ids=refused)

    async def LeaseBatch(self, request: v1.LeaseBatchRequest, context: Context) -> v1.LeaseBatchResponse:
        leased = await self._broker.lease_batch(
            _worker(request.worker_id), request.wait_s, request.run_id, request.batches
        )
        answer = v1.LeaseBatchResponse(run_finished=leased.run_finished)
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

    async def RestoreRun(self, request: v1.RestoreRunRequest, context: Context) -> v1.RestoreRunResponse:
        return pairs.RESTORED.to(await self._broker.restore_run(pairs.TRAINED_STATE.of(request)))

    async def ReadCurriculum(self, request: v1.ReadCurriculumRequest, context: Context) -> v1.ReadCurriculumResponse:
        state = await self._broker.read_curriculum()
        return v1.ReadCurriculumResponse(curriculum=pairs.CURRICULUM.to(state), run=self._broker.run)

    async def CommitBatch(self, request: v1.CommitBatchRequest, context: Context) -> v1.CommitBatchResponse:
        already = await self._broker.commit_batch(request.batch_id, request.step, request.groups)
        return v1.CommitBatchResponse(already_committed=already)

    async def PublishPolicy(self, request: v1.PublishPolicyRequest, context: Context) -> v1.PublishPolicyResponse:
        version = await self._broker.publish_policy(pairs.MANIFEST.of(request.manifest))
        return v1.PublishPolicyResponse(policy_version=version)

    async def WatchPolicy(
        self, request: v1.WatchPolicyRequest, context: Context
    ) -> AsyncIterator[v1.WatchPolicyResponse]:
        async for manifest in self._broker.watch_policy():
            yield v1.WatchPolicyResponse(manifest=pairs.MANIFEST.to(manifest))

    async def Heartbeat(self, request: v1.HeartbeatRequest, context: Context) -> v1.HeartbeatResponse:
        lost = await self._broker.heartbeat(
            _worker(request.worker_id),
            request.lease_ids,
            request.progress,
            paused=request.paused,
            oldest_versions=[None if version < 0 else version for version in request.oldest_versions],
        )
        return v1.HeartbeatResponse(lost_lease_ids=lost, reasons=lost.values())

    async def ReleaseLeases(self, request: v1.ReleaseLeasesRequest, context: Context) -> v1.ReleaseLeasesResponse:
        released = await self._broker.release_leases(
            _worker(request.worker_id), request.lease_ids, request.refused, abandoned=request.abandoned
        )
        if not request.lease_ids:
            log.info("a worker stopped", extra={"worker_id": request.worker_id, "leases_given_back": released})
        return v1.ReleaseLeasesResponse(released=released)

    async def ReportBatchFailure(
        self, request: v1.ReportBatchFailureRequest, context: Context
    ) -> v1.ReportBatchFailureResponse:
        held_back = await self._broker.operations.report_batch_failure(request.batch_id, request.reason)
        return v1.ReportBatchFailureResponse(held_back=held_back)

    async def DropBatch(self, request: v1.DropBatchRequest, context: Context) -> v1.DropBatchResponse:
        return v1.DropBatchResponse(dropped_rollouts=await self._broker.operations.drop_batch(request.batch_id))

    async def SetRunMode(self, request: v1.SetRunModeRequest, context: Context) -> v1.SetRunModeResponse:
        former = await self._broker.operations.set_mode(pairs.MODE[request.mode])
        return v1.SetRunModeResponse(former=pairs.MODE.of_member[former])

    async def ListDeadLetters(self, request: v1.ListDeadLettersRequest, context: Context) -> v1.ListDeadLettersResponse:
        letters = await self._broker.operations.dead_letters(request.max_letters)
        return v1.ListDeadLettersResponse(letters=map(pairs.DEAD_LETTER.to, letters))

    async def RemoveDeadLetters(
        self, request: v1.RemoveDeadLettersRequest, context: Context
    ) -> v1.RemoveDeadLettersResponse:
        removed, problems = await self._broker.operations.remove_dead_letters(
            request.letter_ids, requeue=request.requeue
        )
        return v1.RemoveDeadLettersResponse(removed=removed, requeued_problem_ids=problems)

    async def FinishRun(self, request: v1.FinishRunRequest, context: Context) -> v1.FinishRunResponse:
        return v1.FinishRunResponse(ledger=pairs.LEDGER.to(await self._broker.finish_run(request.reason)))

    async def ContinueRun(self, request: v1.ContinueRunRequest, context: Context) -> v1.ContinueRunResponse:
        return v1.ContinueRunResponse(had_ended=await self._broker.continue_run())

    async def ServeStage(self, request: v1.ServeStageRequest, context: Context) -> v1.ServeStageResponse:
        await self._broker.serve_stage(request.run_name)
        return v1.ServeStageResponse()

    async def Status(self, request: v1.StatusRequest, context: Context) -> v1.StatusResponse:
        return pairs.STATUS.to(await self._broker.status())

    async def WhyStalled(self, request: v1.WhyStalledRequest, context: Context) -> v1.WhyStalledResponse:
        blockers = await self._broker.why_stalled()
        return v1.WhyStalledResponse(blockers=map(pairs.BLOCKER.to, blockers))


def add_to_server(broker: Broker, server: grpc.aio.Server) -> None:
    """Have `server` answer the calls of broker.proto with `broker`."""
    broker_pb2_grpc.add_BrokerServiceServicer_to_server(BrokerServicer(broker), server)


def _worker(worker_id: str) -> str:
    """A checked worker id: it becomes the name of a consumer in Redis. Raises InvalidMessage."""
    if not 0 < len(worker_id) <= 200 or worker_id == "released":
        raise convert.InvalidMessage("worker_id must have 1 to 200 characters and not be 'released'")
    return worker_id
