"""Counting the fields of a message equals counting those of the parsed message, at every bound."""

from __future__ import annotations

from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.v1 import verdict_pb2, verifier_pb2
from nouscoder.verifier.access.grpc_gate import has_more_fields

TEXTS = st.text(max_size=200)
STDIN = st.builds(
    lambda cases: verdict_pb2.Tests(stdin=verdict_pb2.StdinTests(cases=cases)),
    st.lists(st.builds(verdict_pb2.StdinCase, input=TEXTS, output=TEXTS, args=st.lists(TEXTS, max_size=3)), max_size=9),
)
CALLS = st.builds(
    lambda entry, cases: verdict_pb2.Tests(call=verdict_pb2.CallTests(entry_point=entry, cases=cases)),
    TEXTS,
    st.lists(st.builds(verdict_pb2.CallCase, args_json=TEXTS, expected_json=TEXTS), max_size=9),
)
REQUESTS = st.builds(
    lambda tests, files, code, limit: verifier_pb2.GradeRequest(
        submission=verdict_pb2.Submission(
            tests=tests, files=files, code=code, limits=verdict_pb2.Limits(wall_time_s=limit), run_all_tests=True
        )
    ),
    STDIN | CALLS,
    st.dictionaries(TEXTS, TEXTS, max_size=3),
    TEXTS,
    st.floats(allow_nan=False),
)
DESCRIPTOR = verifier_pb2.GradeRequest.DESCRIPTOR


def count(message: Message) -> int:
    """The fields of a message and of those in it, as they are written."""
    found = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found += 3 * len(value)  # the entry, its key and its value, which are written even if they are empty
        elif field.message_type is not None:
            values = [value] if hasattr(value, "ListFields") else value
            found += sum(1 + count(one) for one in values)
        else:
            found += len(value) if not isinstance(value, str | bytes) and hasattr(value, "__len__") else 1
    return found


@given(REQUESTS)
def test_the_count_is_that_of_the_parsed_message(request: verifier_pb2.GradeRequest) -> None:
    data, num_fields = request.SerializeToString(), count(request)
    assert not has_more_fields(data, DESCRIPTOR, num_fields)
    assert has_more_fields(data, DESCRIPTOR, num_fields - 1)


@given(REQUESTS, st.integers(1, 50))
def test_unknown_fields_count_too(request: verifier_pb2.GradeRequest, num_unknown: int) -> None:
    unknown = b"\xf8\x07\x01"  # number 127, a varint
    data = request.SerializeToString() + num_unknown * unknown
    assert has_more_fields(data, DESCRIPTOR, count(request) + num_unknown - 1)
    assert not has_more_fields(data, DESCRIPTOR, count(request) + num_unknown)


@given(st.binary(max_size=400), st.integers(0, 100))
def test_any_bytes_are_counted_in_bounded_time(data: bytes, most: int) -> None:
    if not has_more_fields(data, DESCRIPTOR, most):
        assert not has_more_fields(data, DESCRIPTOR, most + 1)
    assert not has_more_fields(data, DESCRIPTOR, len(data))


@given(REQUESTS, st.data())
def test_a_message_that_is_cut_off_has_no_more_fields(request: verifier_pb2.GradeRequest, data: st.DataObject) -> None:
    whole = request.SerializeToString()
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    assert not has_more_fields(cut, DESCRIPTOR, count(request))
