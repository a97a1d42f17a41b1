"""Tasks, rollouts, batches and the ledger, protocol <-> domain.

Arrays travel as packed little-endian bytes. Every `*_from` raises InvalidMessage naming the field at fault.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.ledger import Ledger
from nouscoder.domain.rollout import FinishReason, Rollout, Sampling, Task, VersionSpan
from nouscoder.rpc.faults import InvalidMessage as InvalidMessage
from nouscoder.rpc.tests_convert import tests_from as tests_from
from nouscoder.rpc.tests_convert import tests_to as tests_to
from nouscoder.rpc.verdict_convert import verdict_from, verdict_to
from nouscoder.v1 import broker_pb2, rollout_pb2

_FINISH_OUT = {reason: rollout_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_FINISH_IN: dict[int, FinishReason] = {number: reason for reason, number in _FINISH_OUT.items()}


def _pack(typecode: str, values: Iterable[float]) -> bytes:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(typecode: str, data: bytes, field: str) -> array[float]:
    values: array[float] = array(typecode)
    if len(data) % values.itemsize:
        raise InvalidMessage(f"{field}: {len(data)} bytes are not a whole number of {values.itemsize}-byte values")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


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
    )


def task_from(message: rollout_pb2.Task) -> Task:
    """Protocol -> domain."""
    if not message.rollout_id:
        raise InvalidMessage("task.rollout_id is empty")
    return Task(
        message.rollout_id, message.group_id, message.problem_id, message.prompt, sampling_from(message.sampling)
    )


def rollout_to(rollout: Rollout) -> rollout_pb2.Rollout:
    """Domain -> protocol."""
    return rollout_pb2.Rollout(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        problem_id=rollout.problem_id,
        prompt_token_ids=_pack("i", rollout.prompt_token_ids),
        token_ids=_pack("i", rollout.token_ids),
        logprobs=_pack("f", rollout.logprobs),
        loss_mask=bytes(rollout.loss_mask),
        versions=[
            rollout_pb2.VersionSpan(policy_version=span.policy_version, num_tokens=span.num_tokens)
            for span in rollout.versions
        ],
        finish_reason=_FINISH_OUT[rollout.finish_reason],
        text=rollout.text,
    )


def rollout_from(message: rollout_pb2.Rollout) -> Rollout:
    """Protocol -> domain."""
    if message.finish_reason not in _FINISH_IN:
        raise InvalidMessage("rollout.finish_reason is not set")
    try:
        return Rollout(
            rollout_id=message.rollout_id,
            group_id=message.group_id,
            problem_id=message.problem_id,
            prompt_token_ids=tuple(int(v) for v in _unpack("i", message.prompt_token_ids, "rollout.prompt_token_ids")),
            token_ids=tuple(int(v) for v in _unpack("i", message.token_ids, "rollout.token_ids")),
            logprobs=tuple(_unpack("f", message.logprobs, "rollout.logprobs")),
            loss_mask=tuple(bool(v) for v in message.loss_mask),
            versions=tuple(VersionSpan(span.policy_version, span.num_tokens) for span in message.versions),
            finish_reason=_FINISH_IN[message.finish_reason],
            text=message.text,
        )
    except InvalidMessage:
        raise
    except ValueError as error:
        raise InvalidMessage(str(error)) from error


def batch_to(batch: Batch) -> broker_pb2.Batch:
    """Domain -> protocol."""
    rollouts = [
        broker_pb2.GradedRollout(rollout=rollout_to(graded.rollout), verdict=verdict_to(graded.verdict))
        for graded in batch.rollouts
    ]
    return broker_pb2.Batch(batch_id=batch.batch_id, rollouts=rollouts, policy_version=batch.policy_version)


def batch_from(message: broker_pb2.Batch) -> Batch:
    """Protocol -> domain."""
    rollouts = tuple(GradedRollout(rollout_from(g.rollout), verdict_from(g.verdict)) for g in message.rollouts)
    return Batch(message.batch_id, rollouts, message.policy_version)


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
    )


def encode_rollout(rollout: Rollout) -> bytes:
    """The bytes kept for a rollout."""
    return rollout_to(rollout).SerializeToString()


def decode_rollout(data: bytes) -> Rollout:
    """The rollout kept as bytes."""
    return rollout_from(rollout_pb2.Rollout.FromString(data))


def encode_batch(batch: Batch) -> bytes:
    """The bytes kept for a batch."""
    return batch_to(batch).SerializeToString()


def decode_batch(data: bytes) -> Batch:
    """The batch kept as bytes."""
    return batch_from(broker_pb2.Batch.FromString(data))
