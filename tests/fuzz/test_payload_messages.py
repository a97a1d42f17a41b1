"""Invalid gRPC messages give INVALID_ARGUMENT (RESOURCE_EXHAUSTED for size) with one sentence, never INTERNAL."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import grpc
import pytest

from nouscoder.domain.submission import Comparator
from nouscoder.v1 import verdict_pb2, verifier_pb2

ANSWER_S = 60.0  # an answer takes a second; a busy machine takes its time
GRADE = "/nouscoder.v1.VerifierService/Grade"
BATCH = "/nouscoder.v1.VerifierService/GradeBatch"
STDIN = verdict_pb2.Submission(
    code="print(input())",
    tests=verdict_pb2.Tests(stdin=verdict_pb2.StdinTests(cases=[verdict_pb2.StdinCase(input="1", output="1")])),
)
_CASE = verdict_pb2.CallCase(args_json="[1]", expected_json="1")
CALL = verdict_pb2.Submission(
    code="def f(x): return x",
    tests=verdict_pb2.Tests(call=verdict_pb2.CallTests(entry_point="f", cases=[_CASE])),
)


class Verifier(Protocol):
    """See conftest.py."""

    grpc: str


@pytest.fixture
def channel(verifier: Verifier) -> Iterator[grpc.Channel]:
    """A channel without a limit on the size of sent messages."""
    with grpc.insecure_channel(verifier.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        yield channel


def refusal(channel: grpc.Channel, message: bytes) -> tuple[grpc.StatusCode, str]:
    """The answer of Grade to these bytes."""
    call = channel.unary_unary(GRADE, request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as refused:
        call(message, timeout=ANSWER_S)
    error: Any = refused.value
    return error.code(), error.details()


def changed(base: verdict_pb2.Submission = STDIN, **fields: Any) -> bytes:
    """A request with fields of the submission set by name: `tests__call__cases__0__args_json`."""
    message = verdict_pb2.Submission()
    message.CopyFrom(base)
    for path, value in fields.items():
        *before, last = path.split("__")
        at: Any = message
        for part in before:
            at = at[int(part)] if part.isdigit() else getattr(at, part)
        setattr(at, last, value)
    return verifier_pb2.GradeRequest(submission=message).SerializeToString()


ARGS, KWARGS, EXPECTED = (f"tests__call__cases__0__{name}_json" for name in ("args", "kwargs", "expected"))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (b"", "submission"),
        (changed(limits__wall_time_s=math.nan), "limits.wall_time_s"),
        (changed(limits__wall_time_s=math.inf), "limits.wall_time_s"),
        (changed(limits__cpu_time_s=-1.0), "limits.cpu_time_s"),
        (changed(limits__memory_bytes=2**64 - 1), "limits.memory_bytes"),
        (changed(limits__output_bytes=2**63), "limits.output_bytes"),
        (changed(limits__processes=2**32 - 1), "limits.processes"),
        (changed(comparator__kind=99), "comparator.kind"),
        (changed(comparator__float_tolerance=math.nan), "comparator.float_tolerance"),
        (changed(comparator__absolute_tolerance=math.inf), "comparator.absolute_tolerance"),
        (changed(comparator__relative_tolerance=-0.1), "comparator.relative_tolerance"),
        (changed(profile=99), "profile"),
        (changed(prelude=99), "prelude"),
        (changed(language="x" * 1_000_000), "language"),
        (changed(language="python\0"), "language"),
        (changed(CALL, tests__call__entry_point=""), "tests.entry_point"),
        (changed(CALL, tests__call__entry_point="f\0"), "tests.entry_point"),
        (changed(CALL, **{ARGS: "{}"}), "tests.cases[0].args"),
        (changed(CALL, **{ARGS: "[" * 100_000}), "tests.call.cases[0].args_json"),
        (changed(CALL, **{ARGS: "[1,"}), "tests.call.cases[0].args_json"),
        (changed(CALL, **{KWARGS: "[]"}), "tests.cases[0].kwargs"),
        (changed(CALL, **{EXPECTED: "1" + "0" * 5000}), "tests.call.cases[0].expected_json"),
        (changed(CALL, **{EXPECTED: "nul"}), "tests.call.cases[0].expected_json"),
        (changed(tests__json=b"{"), "body: not JSON"),
        (changed(tests__json=b'{"type": "stdin", "cases": []}'), "tests.cases"),
        (changed(tests__digest="sha256:0"), "tests.digest"),
        (changed(CALL, **{ARGS: '["\\ud800"]'}), "body: not JSON"),
        (verifier_pb2.GradeRequest(submission=verdict_pb2.Submission(code="1")).SerializeToString(), "tests"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_value_is_an_invalid_argument(channel: grpc.Channel, message: bytes, field: str) -> None:
    code, details = refusal(channel, message)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert details.startswith(field), details
    assert len(details) < 500
    assert "\n" not in details


@pytest.mark.parametrize(
    "message",
    [
        b"\xff" * 100,
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a\x04\x0a\x02\xff\xfe",  # code that is not UTF-8
        b"\x0a\x05\x0a\x03\xed\xa0\x80",  # code that is a surrogate
        b"\x0b" * 100_000,  # groups in groups
    ],
    ids=["noise", "length", "UTF-8", "surrogate", "groups"],
)
def test_bytes_other_than_a_message_are_an_invalid_argument(channel: grpc.Channel, message: bytes) -> None:
    code, details = refusal(channel, message)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert 3 < len(details) < 500
    call = channel.stream_stream(BATCH, request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as refused:
        list(call(iter([message]), timeout=ANSWER_S))
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()


def test_a_message_of_100_mb_is_too_large(channel: grpc.Channel) -> None:
    code, details = refusal(channel, changed(code="x" * 100_000_000))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, details
    assert "larger" in details


def test_json_values_other_than_finite_numbers_are_accepted(channel: grpc.Channel) -> None:
    call = channel.unary_unary(
        GRADE,
        request_serializer=bytes,
        response_deserializer=verifier_pb2.GradeResponse.FromString,
    )
    assert Comparator().absolute == 0
    for json_value in ("NaN", "1e400", '"\\u0000"', "1" + "0" * 4000):
        payload = changed(CALL, **{ARGS: f"[{json_value}]", EXPECTED: json_value})
        verdict = call(payload, timeout=ANSWER_S).verdict
        assert verdict.kind == verdict_pb2.VERDICT_KIND_ACCEPTED, (json_value[:20], verdict)


def test_messages_with_very_many_fields_are_refused_before_they_are_parsed(channel: grpc.Channel) -> None:
    """64 MiB of empty cases took the gateway 21 s and 2.2 GB."""
    cases = b"\x0a\x00" * (25 << 20)
    tests = b"\x0a" + varint(len(cases)) + cases
    number = verdict_pb2.Submission.DESCRIPTOR.fields_by_name["tests"].number
    assert verdict_pb2.Tests.DESCRIPTOR.fields_by_name["stdin"].number == 1
    submission = varint(number << 3 | 2) + varint(len(tests)) + tests
    message = b"\x0a" + varint(len(submission)) + submission
    code, details = refusal(channel, message)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "the request has more than 45,000 fields"
    stream = channel.stream_stream(BATCH, request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as refused:
        list(stream(iter([message]), timeout=ANSWER_S))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_many_values_in_tests_are_graded_and_too_many_are_refused(channel: grpc.Channel) -> None:
    """As those of a large body of REST, as JSON and in the fields of the protocol."""
    grade = channel.unary_unary(
        GRADE, request_serializer=bytes, response_deserializer=verifier_pb2.GradeResponse.FromString
    )
    numbers = f"[{','.join(['7'] * 100_000)}]"
    whole = f'{{"type":"call","entry_point":"f","cases":[{{"args":[{numbers}],"expected":{numbers}}}]}}'
    as_json = verdict_pb2.Submission(code="def f(x): return x", tests=verdict_pb2.Tests(json=whole.encode()))
    as_fields = changed(
        CALL, tests__call__cases__0__args_json=f"[{numbers}]", tests__call__cases__0__expected_json=numbers
    )
    for message in (verifier_pb2.GradeRequest(submission=as_json).SerializeToString(), as_fields):
        verdict = grade(message, timeout=ANSWER_S).verdict
        assert verdict.kind == verdict_pb2.VERDICT_KIND_ACCEPTED, verdict
    heavy = f"[{','.join(['[]'] * 3_000_000)}]"
    as_json.tests.json = whole.replace(numbers, heavy, 1).encode()
    for message in (
        verifier_pb2.GradeRequest(submission=as_json).SerializeToString(),
        changed(CALL, tests__call__cases__0__args_json=f"[{heavy}]"),
    ):
        code, details = refusal(channel, message)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(("body: must have at most 8388608 bytes", "tests.cases[0]: holds too many values"))


def varint(value: int) -> bytes:
    """A number as a varint."""
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])
