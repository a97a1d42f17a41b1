"""Protocol <-> domain, in one place: stubs never leave rpc/ and the service modules.

Arrays travel as packed little-endian bytes. Every `*_from` raises InvalidMessage naming the field at fault.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from nouscoder.batch import Batch, GradedRollout
from nouscoder.ledger import Ledger
from nouscoder.policy import PolicyManifest
from nouscoder.rollout import FinishReason, Rollout, Sampling, Task, VersionSpan
from nouscoder.rpc.faults import InvalidMessage as InvalidMessage
from nouscoder.rpc.tests_convert import tests_from as tests_from
from nouscoder.rpc.tests_convert import tests_to as tests_to
from nouscoder.submission import Comparator, ComparatorKind, Limits, Prelude, Profile, Submission
from nouscoder.v1 import broker_pb2, policy_pb2, rollout_pb2, verdict_pb2
from nouscoder.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind

_KIND_OUT = {kind: verdict_pb2.VerdictKind.Value(f"VERDICT_KIND_{kind.name}") for kind in VerdictKind}
_KIND_IN: dict[int, VerdictKind] = {number: kind for kind, number in _KIND_OUT.items()}
_FINISH_OUT = {reason: rollout_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_FINISH_IN: dict[int, FinishReason] = {number: reason for reason, number in _FINISH_OUT.items()}
_COMPARE_OUT = {kind: verdict_pb2.ComparatorKind.Value(f"COMPARATOR_KIND_{kind.name}") for kind in ComparatorKind}
_COMPARE_IN: dict[int, ComparatorKind] = {number: kind for kind, number in _COMPARE_OUT.items()} | {
    0: ComparatorKind.TOKENS
}
_PROFILE_OUT = {profile: verdict_pb2.Profile.Value(f"PROFILE_{profile.name}") for profile in Profile}
_PROFILE_IN: dict[int, Profile] = {number: profile for profile, number in _PROFILE_OUT.items()} | {0: Profile.PROCESS}
_PRELUDE_OUT = {prelude: verdict_pb2.Prelude.Value(f"PRELUDE_{prelude.name}") for prelude in Prelude}
_PRELUDE_IN: dict[int, Prelude] = {number: prelude for prelude, number in _PRELUDE_OUT.items()} | {0: Prelude.NONE}


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


def manifest_to(manifest: PolicyManifest) -> policy_pb2.PolicyManifest:
    """Domain -> protocol."""
    return policy_pb2.PolicyManifest(
        policy_version=manifest.policy_version,
        path=manifest.path,
        sha256=manifest.sha256,
        num_bytes=manifest.num_bytes,
        step=manifest.step,
    )


def manifest_from(message: policy_pb2.PolicyManifest) -> PolicyManifest:
    """Protocol -> domain."""
    if not message.path or len(message.sha256) != 64:
        raise InvalidMessage("manifest.path and a manifest.sha256 of 64 hexadecimal digits are needed")
    return PolicyManifest(message.policy_version, message.path, message.sha256, message.num_bytes, message.step)


def limits_to(limits: Limits) -> verdict_pb2.Limits:
    """Domain -> protocol."""
    return verdict_pb2.Limits(
        wall_time_s=limits.wall_time_s,
        cpu_time_s=limits.cpu_time_s,
        memory_bytes=limits.memory_bytes,
        output_bytes=limits.output_bytes,
        processes=limits.processes,
    )


def limits_from(message: verdict_pb2.Limits) -> Limits:
    """Protocol -> domain; 0 takes the default."""
    default = Limits()
    try:
        return Limits(
            message.wall_time_s or default.wall_time_s,
            message.cpu_time_s or default.cpu_time_s,
            message.memory_bytes or default.memory_bytes,
            message.output_bytes or default.output_bytes,
            message.processes or default.processes,
        )
    except ValueError as error:
        raise InvalidMessage(str(error)) from error


def comparator_to(comparator: Comparator) -> verdict_pb2.Comparator:
    """Domain -> protocol."""
    return verdict_pb2.Comparator(
        kind=_COMPARE_OUT[comparator.kind],
        float_tolerance=comparator.float_tolerance,
        absolute_tolerance=comparator.absolute_tolerance,
        relative_tolerance=comparator.relative_tolerance,
    )


def comparator_from(message: verdict_pb2.Comparator) -> Comparator:
    """Protocol -> domain."""
    if message.kind not in _COMPARE_IN:
        raise InvalidMessage(f"comparator.kind {message.kind} is unknown")
    tolerances = {name: getattr(message, f"{name}_tolerance") for name in ("float", "absolute", "relative")}
    for name, value in tolerances.items():
        if not value >= 0:
            raise InvalidMessage(f"comparator.{name}_tolerance must be at least 0")
    return Comparator(_COMPARE_IN[message.kind], *tolerances.values())


def submission_to(submission: Submission) -> verdict_pb2.Submission:
    """Domain -> protocol."""
    message = verdict_pb2.Submission(
        language=submission.language,
        tests=tests_to(submission.tests),
        limits=limits_to(submission.limits),
        comparator=comparator_to(submission.comparator),
        run_all_tests=not submission.stop_on_first_failure,
        withhold_failure=not submission.reveal,
        profile=_PROFILE_OUT[submission.profile],
        prelude=_PRELUDE_OUT[submission.prelude],
        problem_id=submission.problem_id,
    )
    if submission.code is not None:
        message.code = submission.code
    else:
        message.completion = submission.completion or ""
    return message


def submission_from(message: verdict_pb2.Submission) -> Submission:
    """Protocol -> domain."""
    source = message.WhichOneof("source")
    if source is None:
        raise InvalidMessage("submission has neither code nor completion")
    if message.profile not in _PROFILE_IN:
        raise InvalidMessage(f"submission.profile {message.profile} is unknown")
    if message.prelude not in _PRELUDE_IN:
        raise InvalidMessage(f"submission.prelude {message.prelude} is unknown")
    return Submission(
        tests=tests_from(message.tests),
        code=message.code if source == "code" else None,
        completion=message.completion if source == "completion" else None,
        language=message.language or "python",
        limits=limits_from(message.limits),
        comparator=comparator_from(message.comparator),
        stop_on_first_failure=not message.run_all_tests,
        reveal=not message.withhold_failure,
        profile=_PROFILE_IN[message.profile],
        prelude=_PRELUDE_IN[message.prelude],
        problem_id=message.problem_id,
    )


def outcome_to(outcome: TestOutcome) -> verdict_pb2.TestOutcome:
    """Domain -> protocol."""
    return verdict_pb2.TestOutcome(
        index=outcome.index,
        outcome=_KIND_OUT[outcome.outcome],
        wall_time_s=outcome.wall_time_s,
        cpu_time_s=outcome.cpu_time_s,
        memory_bytes=outcome.memory_bytes,
    )


def _kind_from(number: int, field: str) -> VerdictKind:
    if number not in _KIND_IN:
        raise InvalidMessage(f"{field} is not set")
    return _KIND_IN[number]


def outcome_from(message: verdict_pb2.TestOutcome) -> TestOutcome:
    """Protocol -> domain."""
    kind = _kind_from(message.outcome, "outcome.outcome")
    return TestOutcome(message.index, kind, message.wall_time_s, message.cpu_time_s, message.memory_bytes)


def verdict_to(verdict: Verdict) -> verdict_pb2.Verdict:
    """Domain -> protocol."""
    message = verdict_pb2.Verdict(
        kind=_KIND_OUT[verdict.kind],
        passed=verdict.passed,
        total=verdict.total,
        graded=verdict.graded,
        duration_s=verdict.duration_s,
        backend=verdict.backend,
        cached=verdict.cached,
        tests=[outcome_to(outcome) for outcome in verdict.tests],
        detail=verdict.detail,
    )
    failure = verdict.first_failure
    if failure is not None:
        message.first_failure.CopyFrom(
            verdict_pb2.FirstFailure(
                index=failure.index,
                outcome=_KIND_OUT[failure.outcome],
                input=failure.input,
                expected=failure.expected,
                output=failure.output,
                stderr=failure.stderr,
            )
        )
    return message


def verdict_from(message: verdict_pb2.Verdict) -> Verdict:
    """Protocol -> domain."""
    failure: FirstFailure | None = None
    if message.HasField("first_failure"):
        first = message.first_failure
        kind = _kind_from(first.outcome, "verdict.first_failure.outcome")
        failure = FirstFailure(first.index, kind, first.input, first.expected, first.output, first.stderr)
    return Verdict(
        kind=_kind_from(message.kind, "verdict.kind"),
        passed=message.passed,
        total=message.total,
        graded=message.graded,
        duration_s=message.duration_s,
        backend=message.backend,
        cached=message.cached,
        tests=tuple(outcome_from(outcome) for outcome in message.tests),
        first_failure=failure,
        detail=message.detail,
    )


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


def encode_verdict(verdict: Verdict) -> bytes:
    """The bytes kept for a verdict."""
    return verdict_to(verdict).SerializeToString()


def decode_verdict(data: bytes) -> Verdict:
    """The verdict kept as bytes."""
    return verdict_from(verdict_pb2.Verdict.FromString(data))


def encode_batch(batch: Batch) -> bytes:
    """The bytes kept for a batch."""
    return batch_to(batch).SerializeToString()


def decode_batch(data: bytes) -> Batch:
    """The batch kept as bytes."""
    return batch_from(broker_pb2.Batch.FromString(data))
