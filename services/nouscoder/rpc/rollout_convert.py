"""Tasks, rollouts, batches and the ledger, protocol <-> domain.

Every `*_from` raises InvalidMessage naming the field at fault.
"""

from __future__ import annotations

from nouscoder.domain.batch import RecordedBatch, RecordedRollout
from nouscoder.domain.problem import PublicTests
from nouscoder.domain.rollout import RolloutHeader, Sampling, Task
from nouscoder.domain.run_status import Ledger
from nouscoder.domain.submission import TestsReference
from nouscoder.domain.tokens import FinishReason
from nouscoder.rpc.faults import InvalidMessage as InvalidMessage
from nouscoder.rpc.tests_convert import tests_from as tests_from
from nouscoder.rpc.tests_convert import tests_to as tests_to
from nouscoder.rpc.verdict_convert import rules_from, rules_to, verdict_from, verdict_to
from nouscoder.v1 import broker_pb2, rollout_pb2

_FINISH_OUT = {reason: rollout_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_FINISH_IN: dict[int, FinishReason] = {number: reason for reason, number in _FINISH_OUT.items()}


def sampling_to(sampling: Sampling) -> rollout_pb2.Sampling:
    """Domain -> protocol."""
    return rollout_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
    )


def sampling_from(message: rollout_pb2.Sampling) -> Sampling:
    """Protocol -> domain."""
    if message.max_new_tokens < 1:
        raise InvalidMessage("sampling.max_new_tokens must be at least 1")
    if not message.temperature >= 0:
        raise InvalidMessage("sampling.temperature must be at least 0")
    return Sampling(message.temperature, message.top_p or 1.0, message.max_new_tokens, message.seed)


def task_to(task: Task) -> rollout_pb2.Task:
    """Domain -> protocol."""
    return rollout_pb2.Task(
        rollout_id=task.rollout_id,
        group_id=task.group_id,
        problem_id=task.problem_id,
        prompt=task.prompt,
        sampling=sampling_to(task.sampling),
        min_policy_version=task.min_policy_version,
        prompt_template=task.prompt_template,
        public_tests=None if task.public_tests is None else public_tests_to(task.public_tests),
    )


def task_from(message: rollout_pb2.Task) -> Task:
    """Protocol -> domain."""
    if not message.rollout_id:
        raise InvalidMessage("task.rollout_id is empty")
    return Task(
        rollout_id=message.rollout_id,
        group_id=message.group_id,
        problem_id=message.problem_id,
        prompt=message.prompt,
        sampling=sampling_from(message.sampling),
        min_policy_version=message.min_policy_version,
        prompt_template=message.prompt_template,
        public_tests=public_tests_from(message.public_tests) if message.HasField("public_tests") else None,
    )


def public_tests_to(public: PublicTests) -> rollout_pb2.PublicTests:
    """Domain -> protocol."""
    return rollout_pb2.PublicTests(tests=tests_to(public.tests), rules=rules_to(public.rules))


def public_tests_from(message: rollout_pb2.PublicTests) -> PublicTests:
    """Protocol -> domain."""
    tests = tests_from(message.tests)
    if isinstance(tests, TestsReference):
        raise InvalidMessage("task.public_tests.tests must be the tests themselves, not a digest")
    return PublicTests(tests, rules_from(message.rules))


def header_to(header: RolloutHeader) -> rollout_pb2.RolloutHeader:
    """Domain -> protocol."""
    return rollout_pb2.RolloutHeader(
        rollout_id=header.rollout_id,
        group_id=header.group_id,
        problem_id=header.problem_id,
        num_tokens=header.num_tokens,
        num_prompt_tokens=header.num_prompt_tokens,
        oldest_version=header.oldest_version,
        newest_version=header.newest_version,
        finish_reason=_FINISH_OUT[header.finish_reason],
        record_bytes=header.record_bytes,
        text_offset=header.text_offset,
        text_bytes=header.text_bytes,
        num_turns=header.num_turns,
        has_thinking=header.has_thinking,
    )


def header_from(message: rollout_pb2.RolloutHeader) -> RolloutHeader:
    """Protocol -> domain."""
    if message.finish_reason not in _FINISH_IN:
        raise InvalidMessage("header.finish_reason is not set")
    if not message.rollout_id:
        raise InvalidMessage("header.rollout_id is empty")
    if message.oldest_version > message.newest_version:
        raise InvalidMessage("header.oldest_version is newer than header.newest_version")
    return RolloutHeader(
        rollout_id=message.rollout_id,
        group_id=message.group_id,
        problem_id=message.problem_id,
        num_tokens=message.num_tokens,
        num_prompt_tokens=message.num_prompt_tokens,
        oldest_version=message.oldest_version,
        newest_version=message.newest_version,
        finish_reason=_FINISH_IN[message.finish_reason],
        record_bytes=message.record_bytes,
        text_offset=message.text_offset,
        text_bytes=message.text_bytes,
        num_turns=message.num_turns,
        has_thinking=message.has_thinking,
    )


def encode_header(header: RolloutHeader) -> bytes:
    """The bytes that the broker keeps for a rollout."""
    return header_to(header).SerializeToString()


def decode_header(data: bytes) -> RolloutHeader:
    """The header kept as bytes."""
    return header_from(rollout_pb2.RolloutHeader.FromString(data))


def recorded_rollout_to(recorded: RecordedRollout) -> broker_pb2.GradedRollout:
    """Domain -> protocol."""
    return broker_pb2.GradedRollout(
        header=header_to(recorded.header),
        verdict=verdict_to(recorded.verdict),
        record=recorded.record,
        reward=recorded.reward,
    )


def recorded_batch_to(batch: RecordedBatch) -> broker_pb2.Batch:
    """Domain -> protocol."""
    rollouts = [recorded_rollout_to(recorded) for recorded in batch.rollouts]
    return broker_pb2.Batch(batch_id=batch.batch_id, rollouts=rollouts, policy_version=batch.policy_version)


def recorded_batch_from(message: broker_pb2.Batch) -> RecordedBatch:
    """Protocol -> domain."""
    rollouts = tuple(
        RecordedRollout(header_from(graded.header), verdict_from(graded.verdict), graded.reward, graded.record)
        for graded in message.rollouts
    )
    return RecordedBatch(message.batch_id, rollouts, message.policy_version)


def ledger_to(ledger: Ledger) -> broker_pb2.Ledger:
    """Domain -> protocol."""
    return broker_pb2.Ledger(
        admitted=ledger.admitted,
        trained=ledger.trained,
        filtered=ledger.filtered,
        stale=ledger.stale,
        abandoned=ledger.abandoned,
        in_flight=ledger.in_flight,
        balanced=ledger.balanced,
        lost=ledger.lost,
    )


def ledger_from(message: broker_pb2.Ledger) -> Ledger:
    """Protocol -> domain."""
    return Ledger(
        message.admitted,
        message.trained,
        message.filtered,
        message.stale,
        message.abandoned,
        dict(message.in_flight),
        message.lost,
    )


def encode_batch(batch: RecordedBatch) -> bytes:
    """The bytes kept for a batch, without its records."""
    return recorded_batch_to(batch).SerializeToString()


def decode_batch(data: bytes) -> RecordedBatch:
    """The batch kept as bytes."""
    return recorded_batch_from(broker_pb2.Batch.FromString(data))
