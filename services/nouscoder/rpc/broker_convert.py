"""Messages of broker.proto, protocol <-> domain: leases, run status, books, dead letters, blockers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nouscoder.domain.books import Books, RunIdentity, TrainedGroups
from nouscoder.domain.lease import (
    Lease,
    LeasedBatch,
    LeasedTask,
    LeasedTasks,
    LeaseLoss,
    RecordedGrading,
    RecordedGradings,
)
from nouscoder.domain.run_status import DeadLetter, GivenUpFor, RunMode, RunStatus, StreamStatus
from nouscoder.domain.stall import Blocker, StallCause
from nouscoder.rpc.curriculum_convert import curriculum_from, curriculum_to
from nouscoder.rpc.faults import InvalidMessage
from nouscoder.rpc.policy_convert import manifest_from, manifest_to
from nouscoder.rpc.rollout_convert import (
    header_from,
    header_to,
    ledger_from,
    ledger_to,
    recorded_batch_from,
    task_from,
    task_to,
)
from nouscoder.rpc.verdict_convert import rules_from, rules_to
from nouscoder.v1 import broker_pb2

_RUN_ID = re.compile(r"[0-9a-f]{1,64}")
_STREAMS = {
    "tasks": broker_pb2.LEASE_STREAM_TASKS,
    "grading": broker_pb2.LEASE_STREAM_GRADING,
    "batches": broker_pb2.LEASE_STREAM_BATCHES,
}

_MODES = {
    RunMode.RUNNING: broker_pb2.RUN_MODE_RUNNING,
    RunMode.DRAINING: broker_pb2.RUN_MODE_DRAINING,
    RunMode.PAUSED: broker_pb2.RUN_MODE_PAUSED,
}


def mode_to(mode: RunMode) -> broker_pb2.RunMode.ValueType:
    """Domain -> protocol."""
    return _MODES[mode]


def mode_from(message: broker_pb2.RunMode.ValueType) -> RunMode:
    """Protocol -> domain. Raises InvalidMessage."""
    for mode, value in _MODES.items():
        if value == message:
            return mode
    raise InvalidMessage("mode must be running, draining or paused")


def letter_to(letter: DeadLetter) -> broker_pb2.DeadLetter:
    """Domain -> protocol."""
    message = broker_pb2.DeadLetter(
        letter_id=letter.letter_id,
        stream=letter.stream,
        rollout_id=letter.rollout_id,
        problem_id=letter.problem_id,
        group_id=letter.group_id,
        reason=letter.reason.value,
        detail=letter.detail,
        worker_id=letter.worker_id,
        deliveries=letter.deliveries,
        regrades=letter.regrades,
        age_s=letter.age_s,
        record=letter.record,
    )
    if letter.header is not None:
        message.header.CopyFrom(header_to(letter.header))
    return message


def letter_from(message: broker_pb2.DeadLetter) -> DeadLetter:
    """Protocol -> domain."""
    return DeadLetter(
        letter_id=message.letter_id,
        stream=message.stream,
        rollout_id=message.rollout_id,
        problem_id=message.problem_id,
        group_id=message.group_id,
        reason=GivenUpFor(message.reason),
        detail=message.detail,
        worker_id=message.worker_id,
        deliveries=message.deliveries,
        regrades=message.regrades,
        age_s=message.age_s,
        header=header_from(message.header) if message.HasField("header") else None,
        record=message.record,
    )


def lease_to(lease: Lease, stream: str) -> broker_pb2.Lease:
    """Domain -> protocol; `stream` is tasks, grading or batches."""
    return broker_pb2.Lease(
        lease_id=lease.lease_id,
        stream=_STREAMS[stream],
        expires_in_s=lease.expires_in_s,
        delivery=lease.delivery,
    )


def lease_from(message: broker_pb2.Lease) -> Lease:
    """Protocol -> domain."""
    return Lease(message.lease_id, message.expires_in_s, message.delivery)


def leased_tasks_to(leased: LeasedTasks) -> broker_pb2.LeaseTasksResponse:
    """Domain -> protocol."""
    tasks = [
        broker_pb2.LeasedTask(
            lease=lease_to(item.lease, "tasks"), task=task_to(item.task), num_kept_tokens=item.num_kept_tokens
        )
        for item in leased.tasks
    ]
    return broker_pb2.LeaseTasksResponse(tasks=tasks, run_finished=leased.run_finished)


def leased_tasks_from(message: broker_pb2.LeaseTasksResponse) -> LeasedTasks:
    """Protocol -> domain."""
    tasks = tuple(
        LeasedTask(lease_from(item.lease), task_from(item.task), item.num_kept_tokens) for item in message.tasks
    )
    return LeasedTasks(tasks, message.run_finished)


def leased_gradings_to(leased: RecordedGradings) -> broker_pb2.LeaseGradingResponse:
    """Domain -> protocol."""
    gradings = [
        broker_pb2.LeasedGrading(
            lease=lease_to(item.lease, "grading"),
            header=header_to(item.header),
            record=item.record,
            tests_digest=item.tests_digest,
            rules=rules_to(item.rules),
        )
        for item in leased.gradings
    ]
    return broker_pb2.LeaseGradingResponse(gradings=gradings, run_finished=leased.run_finished)


def leased_gradings_from(message: broker_pb2.LeaseGradingResponse) -> RecordedGradings:
    """Protocol -> domain."""
    gradings = tuple(
        RecordedGrading(
            lease_from(item.lease), header_from(item.header), item.record, item.tests_digest, rules_from(item.rules)
        )
        for item in message.gradings
    )
    return RecordedGradings(gradings, message.run_finished)


def leased_batch_from(message: broker_pb2.LeaseBatchResponse) -> LeasedBatch:
    """Protocol -> domain."""
    if not message.HasField("batch"):
        return LeasedBatch(run_finished=message.run_finished)
    return LeasedBatch(recorded_batch_from(message.batch), lease_from(message.lease), message.run_finished)


def oldest_versions_to(versions: Iterable[int | None]) -> list[int]:
    """Domain -> protocol, where -1 is for work without a token."""
    return [-1 if version is None else version for version in versions]


def oldest_versions_from(versions: Iterable[int]) -> list[int | None]:
    """Protocol -> domain."""
    return [None if version < 0 else version for version in versions]


def lost_leases_from(message: broker_pb2.HeartbeatResponse) -> dict[str, LeaseLoss]:
    """Protocol -> domain."""
    return {
        lease_id: LeaseLoss(reason) for lease_id, reason in zip(message.lost_lease_ids, message.reasons, strict=True)
    }


def run_status_to(status: RunStatus) -> broker_pb2.StatusResponse:
    """Domain -> protocol."""
    streams = [
        broker_pb2.StreamStatus(
            stream=stream.stream,
            lag=stream.lag,
            pending=stream.pending,
            redeliveries=stream.redeliveries,
            dead_letters=stream.dead_letters,
        )
        for stream in status.streams
    ]
    return broker_pb2.StatusResponse(
        run=status.run,
        ledger=ledger_to(status.ledger),
        streams=streams,
        policy_version=status.policy_version or 0,
        has_policy=status.policy_version is not None,
        step=status.step,
        batches_committed=status.batches_committed,
        admission_slots_free=status.admission_slots_free,
        finished=status.finished,
        rollouts_accepted=status.rollouts_accepted,
        rollouts_graded=status.rollouts_graded,
        run_id=status.run_id,
        back_pressure=status.back_pressure,
        missing_problems=status.missing_problems,
        mode=mode_to(status.mode),
        cancelled=status.cancelled,
    )


def run_status_from(message: broker_pb2.StatusResponse) -> RunStatus:
    """Protocol -> domain."""
    streams = tuple(
        StreamStatus(stream.stream, stream.lag, stream.pending, stream.redeliveries, stream.dead_letters)
        for stream in message.streams
    )
    return RunStatus(
        run=message.run,
        ledger=ledger_from(message.ledger),
        streams=streams,
        policy_version=message.policy_version if message.has_policy else None,
        step=message.step,
        batches_committed=message.batches_committed,
        admission_slots_free=message.admission_slots_free,
        finished=message.finished,
        rollouts_accepted=message.rollouts_accepted,
        rollouts_graded=message.rollouts_graded,
        run_id=message.run_id,
        back_pressure=message.back_pressure,
        missing_problems=dict(message.missing_problems),
        mode=mode_from(message.mode),
        cancelled=dict(message.cancelled),
    )


def books_to(books: Books) -> broker_pb2.RestoreRunRequest:
    """Domain -> protocol."""
    identity = books.identity
    return broker_pb2.RestoreRunRequest(
        identity=broker_pb2.RunIdentity(
            run_id=identity.run_id, folder=identity.folder, seed=identity.seed, group_size=identity.group_size
        ),
        batches=books.batches,
        step=books.step,
        rollouts=books.rollouts,
        groups=books.groups.bits,
        policy=None if books.policy is None else manifest_to(books.policy),
        curriculum=curriculum_to(books.curriculum),
    )


def books_from(message: broker_pb2.RestoreRunRequest) -> Books:
    """Protocol -> domain. Raises InvalidMessage."""
    named = message.identity
    if not _RUN_ID.fullmatch(named.run_id):
        raise InvalidMessage("identity.run_id must have 1 to 64 lower-case hexadecimal digits")
    return Books(
        RunIdentity(named.run_id, named.folder, named.seed, named.group_size),
        message.batches,
        message.step,
        message.rollouts,
        TrainedGroups(message.groups),
        manifest_from(message.policy) if message.HasField("policy") else None,
        curriculum_from(message.curriculum),
    )


def blocker_to(blocker: Blocker) -> broker_pb2.Blocker:
    """Domain -> protocol."""
    return broker_pb2.Blocker(
        reason=blocker.reason,
        item_id=blocker.item_id,
        worker_id=blocker.worker_id,
        idle_s=blocker.idle_s,
        cause=blocker.cause.value,
        num_items=blocker.num_items,
    )


def blocker_from(message: broker_pb2.Blocker) -> Blocker:
    """Protocol -> domain."""
    return Blocker(
        StallCause(message.cause), message.reason, message.item_id, message.worker_id, message.idle_s, message.num_items
    )
