"""Submissions and verdicts, protocol <-> domain. Every `*_from` raises InvalidMessage naming the field at fault."""

from __future__ import annotations

from nouscoder.domain.problem import GradingRules
from nouscoder.domain.submission import (
    Comparator,
    ComparatorKind,
    Limits,
    Prelude,
    Profile,
    Submission,
    Tests,
    TestsReference,
    language_name,
)
from nouscoder.domain.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind
from nouscoder.rpc.faults import InvalidMessage as InvalidMessage
from nouscoder.rpc.tests_convert import tests_from as tests_from
from nouscoder.rpc.tests_convert import tests_to as tests_to
from nouscoder.v1 import verdict_pb2

_KIND_OUT = {kind: verdict_pb2.VerdictKind.Value(f"VERDICT_KIND_{kind.name}") for kind in VerdictKind}
_KIND_IN: dict[int, VerdictKind] = {number: kind for kind, number in _KIND_OUT.items()}
_COMPARE_OUT = {kind: verdict_pb2.ComparatorKind.Value(f"COMPARATOR_KIND_{kind.name}") for kind in ComparatorKind}
_COMPARE_IN: dict[int, ComparatorKind] = {number: kind for kind, number in _COMPARE_OUT.items()} | {
    0: ComparatorKind.TOKENS
}
_PROFILE_OUT = {profile: verdict_pb2.Profile.Value(f"PROFILE_{profile.name}") for profile in Profile}
_PROFILE_IN: dict[int, Profile] = {number: profile for profile, number in _PROFILE_OUT.items()} | {0: Profile.PROCESS}
_PRELUDE_OUT = {prelude: verdict_pb2.Prelude.Value(f"PRELUDE_{prelude.name}") for prelude in Prelude}
_PRELUDE_IN: dict[int, Prelude] = {number: prelude for prelude, number in _PRELUDE_OUT.items()} | {0: Prelude.NONE}


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
        ignore_case=comparator.ignore_case,
    )


def comparator_from(message: verdict_pb2.Comparator) -> Comparator:
    """Protocol -> domain."""
    if message.kind not in _COMPARE_IN:
        raise InvalidMessage(f"comparator.kind {message.kind} is unknown")
    tolerances = {name: getattr(message, f"{name}_tolerance") for name in ("float", "absolute", "relative")}
    for name, value in tolerances.items():
        if not value >= 0:
            raise InvalidMessage(f"comparator.{name}_tolerance must be at least 0")
    absolute, relative = message.absolute_tolerance, message.relative_tolerance
    return Comparator(_COMPARE_IN[message.kind], message.float_tolerance, absolute, relative, message.ignore_case)


def rules_to(rules: GradingRules) -> verdict_pb2.GradingRules:
    """Domain -> protocol."""
    return verdict_pb2.GradingRules(
        limits=limits_to(rules.limits),
        comparator=comparator_to(rules.comparator),
        prelude=_PRELUDE_OUT[rules.prelude],
        profile=_PROFILE_OUT[rules.profile],
        text_is_code=rules.text_is_code,
        run_all_tests=rules.run_all_tests,
    )


def rules_from(message: verdict_pb2.GradingRules) -> GradingRules:
    """Protocol -> domain."""
    return GradingRules(
        limits=limits_from(message.limits),
        comparator=comparator_from(message.comparator),
        prelude=_prelude_from(message.prelude),
        profile=_profile_from(message.profile),
        text_is_code=message.text_is_code,
        run_all_tests=message.run_all_tests,
    )


def _profile_from(number: int) -> Profile:
    if number not in _PROFILE_IN:
        raise InvalidMessage(f"profile {number} is unknown")
    return _PROFILE_IN[number]


def _prelude_from(number: int) -> Prelude:
    if number not in _PRELUDE_IN:
        raise InvalidMessage(f"prelude {number} is unknown")
    return _PRELUDE_IN[number]


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
        with_stderr=submission.stderr,
        files=submission.files,
    )
    if submission.code is not None:
        message.code = submission.code
    else:
        message.completion = submission.completion or ""
    return message


def submission_from(message: verdict_pb2.Submission, tests: Tests | TestsReference | None = None) -> Submission:
    """Protocol -> domain. `tests`: those of the message, if they have been converted already."""
    source = message.WhichOneof("source")
    if source is None:
        raise InvalidMessage("submission has neither code nor completion")
    return Submission(
        tests=tests_from(message.tests) if tests is None else tests,
        code=message.code if source == "code" else None,
        completion=message.completion if source == "completion" else None,
        language=language_name(message.language or "python"),
        limits=limits_from(message.limits),
        comparator=comparator_from(message.comparator),
        stop_on_first_failure=not message.run_all_tests,
        reveal=not message.withhold_failure,
        profile=_profile_from(message.profile),
        prelude=_prelude_from(message.prelude),
        problem_id=message.problem_id,
        stderr=message.with_stderr,
        files=dict(message.files),
    )


def outcome_to(outcome: TestOutcome) -> verdict_pb2.TestOutcome:
    """Domain -> protocol."""
    return verdict_pb2.TestOutcome(
        index=outcome.index,
        outcome=_KIND_OUT[outcome.outcome],
        wall_time_s=outcome.wall_time_s,
        cpu_time_s=outcome.cpu_time_s,
        memory_bytes=outcome.memory_bytes,
        points=outcome.points,
        stderr=outcome.stderr,
    )


def _kind_from(number: int, field: str) -> VerdictKind:
    if number not in _KIND_IN:
        raise InvalidMessage(f"{field} is not set")
    return _KIND_IN[number]


def outcome_from(message: verdict_pb2.TestOutcome) -> TestOutcome:
    """Protocol -> domain."""
    kind = _kind_from(message.outcome, "outcome.outcome")
    points = message.points if message.HasField("points") else None
    stderr = message.stderr if message.HasField("stderr") else None
    times = (message.wall_time_s, message.cpu_time_s)
    return TestOutcome(message.index, kind, *times, message.memory_bytes, points, stderr)


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
        score=verdict.score,
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


def encode_verdict(verdict: Verdict) -> bytes:
    """The bytes kept for a verdict."""
    return verdict_to(verdict).SerializeToString()


def decode_verdict(data: bytes) -> Verdict:
    """The verdict kept as bytes."""
    return verdict_from(verdict_pb2.Verdict.FromString(data))
