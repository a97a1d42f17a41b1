"""Each record has the fields of its message, and none other; what is sent arrives unchanged."""

from __future__ import annotations

import string
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nouscoder.domain.learner_state import RunIdentity, TrainedGroups
from nouscoder.domain.policy import PolicyDelta, PolicyManifest, Shard, Transport
from nouscoder.domain.problem import GradingRules
from nouscoder.domain.rollout import RolloutHeader, Sampling, Task
from nouscoder.domain.run_status import DeadLetter, RunMode
from nouscoder.domain.submission import (
    CallCase,
    CallTests,
    Limits,
    StdinCase,
    StdinTests,
    Submission,
    Tests,
    TestsReference,
)
from nouscoder.domain.tokens import FinishReason
from nouscoder.rpc import broker_client, generation_client, learner_client, pairs
from nouscoder.rpc.convert import PAIRS, InvalidMessage, WirePair
from nouscoder.v1 import broker_pb2, policy_pb2, rollout_pb2, verdict_pb2

CLIENTS = (broker_client, generation_client, learner_client)  # their records count as well
TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=5)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
TESTS = st.one_of(
    st.lists(st.builds(StdinCase, TEXT, TEXT), min_size=1, max_size=2).map(lambda cases: StdinTests(tuple(cases))),
    st.just(CallTests("f", (CallCase((1, [2.5]), {"k": None}, "a"),))),
)
NUMBERS = {
    "TYPE_UINT32": st.integers(0, 2**32 - 1),
    "TYPE_UINT64": st.integers(0, 2**64 - 1),
    "TYPE_INT64": st.integers(-(2**63), 2**63 - 1),
    "TYPE_SINT64": st.integers(-(2**63), 2**63 - 1),
    "TYPE_DOUBLE": st.floats(0, allow_nan=False, allow_infinity=False),
    "TYPE_FLOAT": st.floats(0, 2, width=32),
    "TYPE_BOOL": st.booleans(),
    "TYPE_STRING": TEXT,
    "TYPE_BYTES": st.binary(max_size=8),
}
TYPE_NAMES = {getattr(broker_pb2.Lease.DESCRIPTOR.fields[0], name): name for name in NUMBERS}
SHARDS = st.builds(Shard, NAMES.map(lambda name: f"{name}.safetensors"), DIGESTS, NUMBERS["TYPE_UINT64"])
# Records that check themselves, and fields of others with fewer values than their type.
LANGUAGES = st.sampled_from((("python",), ("cpp", "python")))
CHOSEN: dict[Any, st.SearchStrategy[Any]] = {
    Tests: TESTS,
    Tests | TestsReference: TESTS | DIGESTS.map(lambda digest: TestsReference(f"sha256:{digest}")),
    TrainedGroups: st.builds(TrainedGroups, st.binary(max_size=8)),
    RunIdentity: st.builds(RunIdentity, DIGESTS, TEXT, NUMBERS["TYPE_UINT64"], NUMBERS["TYPE_UINT32"]),
    Shard: SHARDS,
    PolicyManifest: st.one_of(
        st.builds(PolicyManifest, *[st.integers(0, 9)] * 2, TEXT, st.tuples(SHARDS), st.sampled_from(Transport)),
        st.builds(
            PolicyManifest,
            *(st.integers(0, 9), st.integers(0, 9), TEXT, st.tuples(SHARDS)),
            delta=st.builds(PolicyDelta, st.integers(0, 9), DIGESTS, st.tuples(SHARDS)),
        ),
        st.builds(PolicyManifest, *(st.just(1), st.just(1), TEXT, st.tuples(SHARDS)), base=st.just(
            PolicyManifest(0, 0, "first", (Shard("a.safetensors", "0" * 64, 1),))
        )),
    ),
    Limits: st.builds(Limits, *[st.floats(0.5, 60)] * 2, *[st.integers(1, 2**40)] * 2, st.integers(1, 99)),
    (Sampling, "top_p"): st.floats(0.25, 1, width=32),
    (Sampling, "max_new_tokens"): st.integers(1, 2**32 - 1),
    (Task, "rollout_id"): NAMES,
    (RolloutHeader, "rollout_id"): NAMES,
    (RolloutHeader, "oldest_version"): st.integers(0, 10),
    (RolloutHeader, "newest_version"): st.integers(10, 20),
    (Submission, "language"): st.sampled_from(("python", "cpp")),
    (Submission, "other_languages"): st.sampled_from(((), ("python", "rust"))),
    (GradingRules, "languages"): LANGUAGES,
    (Task, "languages"): LANGUAGES,
    (Submission, "completion"): st.none(),
    (Submission, "code"): TEXT,
}  # fmt: skip


def value_of(record: type, name: str, hint: Any, field: Any) -> st.SearchStrategy[Any]:
    """Values of one field of a record."""
    if (record, name) in CHOSEN:
        return CHOSEN[record, name]
    inner = [each for each in get_args(hint) if each is not NoneType]
    if hint in CHOSEN:
        return CHOSEN[hint]
    if NoneType in get_args(hint):
        return st.none() | value_of(record, name, inner[0], field)
    if get_origin(hint) is tuple:
        return st.lists(value_of(record, name, inner[0], field), max_size=2).map(tuple)
    if get_origin(hint) is dict:
        key, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
        return st.dictionaries(NUMBERS[TYPE_NAMES[key.type]], NUMBERS[TYPE_NAMES[value.type]], max_size=2)
    if hint in PAIRS:
        return record_of(PAIRS[hint])
    return st.sampled_from(hint) if hasattr(hint, "__members__") else NUMBERS[TYPE_NAMES[field.type]]


def record_of(pair: WirePair[Any, Any]) -> st.SearchStrategy[Any]:
    """Records of a pair, without the fields that are not sent."""
    if pair.record in CHOSEN:
        return CHOSEN[pair.record]
    hints, fields = get_type_hints(pair.record), pair.wire.DESCRIPTOR.fields_by_name
    values = {name: value_of(pair.record, name, hints[name], fields[sent]) for name, sent in pair.names().items()}
    return st.builds(pair.record, **values)


def named(pair: WirePair[Any, Any]) -> str:
    return pair.record.__name__


def differences(pair: WirePair[Any, Any]) -> set[str]:
    """The fields that only one side has."""
    return {*pair.names().values(), *pair.derived()} ^ set(pair.wire.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=named)
def test_a_record_and_its_message_have_the_same_fields(pair: WirePair[Any, Any]) -> None:
    assert differences(pair) == set()


def test_a_field_that_only_one_side_has_is_found() -> None:
    class Outcome(NamedTuple):
        accepted: int
        graded: int

    assert differences(WirePair(Outcome, broker_pb2.GroupOutcome)) == {"graded", "sampled"}
    del PAIRS[Outcome]


@pytest.mark.parametrize("pair", PAIRS.values(), ids=named)
@settings(max_examples=25)
@given(data=st.data())
def test_a_record_arrives_unchanged(pair: WirePair[Any, Any], data: st.DataObject) -> None:
    record = data.draw(record_of(pair))
    assert pair.of(pair.to(record)) == record
    assert pair.decode(pair.encode(record)) == record


STOP = rollout_pb2.FINISH_REASON_STOP
HEADER = RolloutHeader("g000001-0", "g000001", "p", 5, 2, 3, 4, FinishReason.STOP, 100, 60, 40, 1)


def test_a_message_that_breaks_the_protocol_is_refused_with_its_field() -> None:
    refused: list[tuple[WirePair[Any, Any], Any, str]] = [
        (pairs.HEADER, rollout_pb2.RolloutHeader(rollout_id="r"), "rollout_header.finish_reason is not set"),
        (pairs.HEADER, rollout_pb2.RolloutHeader(finish_reason=STOP), "header.rollout_id is empty"),
        (
            pairs.HEADER,
            rollout_pb2.RolloutHeader(rollout_id="r", finish_reason=STOP, oldest_version=1),
            "is newer than",
        ),
        (pairs.TASK, rollout_pb2.Task(), "task.rollout_id is empty"),
        (pairs.TASK, rollout_pb2.Task(rollout_id="r"), "sampling.max_new_tokens must be at least 1"),
        (pairs.SAMPLING, rollout_pb2.Sampling(temperature=-1), "sampling.temperature must be at least 0"),
        (pairs.COMPARATOR, verdict_pb2.Comparator.FromString(b"\x08\x63"), "comparator.kind 99 is unknown"),
        (pairs.COMPARATOR, verdict_pb2.Comparator(relative_tolerance=-1), "comparator.relative_tolerance must be"),
        (pairs.LIMITS, verdict_pb2.Limits(wall_time_s=-1), "limits.wall_time_s must be positive"),
        (pairs.VERDICT, verdict_pb2.Verdict(), "verdict.kind is not set"),
        (pairs.MANIFEST, policy_pb2.PolicyManifest(), "policy_manifest.transport is not set"),
        (pairs.MANIFEST, policy_pb2.PolicyManifest(transport=policy_pb2.POLICY_TRANSPORT_FOLDER), "names no shard"),
        (pairs.TRAINED_STATE, broker_pb2.RestoreRunRequest(), "identity.run_id must have"),
        (pairs.DEAD_LETTER, broker_pb2.DeadLetter(reason="boredom"), "boredom"),
    ]
    for pair, message, says in refused:
        with pytest.raises(InvalidMessage, match=says):
            pair.of(message)
    digest = rollout_pb2.PublicTests(tests=verdict_pb2.Tests(digest="sha256:" + "0" * 64))
    with pytest.raises(InvalidMessage, match="not a digest"):
        pairs.TASK.of(rollout_pb2.Task(rollout_id="r", sampling={"max_new_tokens": 1}, public_tests=digest))  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="mode is not set"):
        pairs.MODE[0]
    for data in (b"\xff\xff", pairs.HEADER.encode(HEADER)[:-1]):
        with pytest.raises(InvalidMessage):
            pairs.HEADER.decode(data)


def test_what_is_not_set_has_the_default_that_the_protocol_names() -> None:
    assert pairs.LIMITS.of(verdict_pb2.Limits()) == Limits()
    assert pairs.RULES.of(verdict_pb2.GradingRules()) == GradingRules()
    task = pairs.TASK.of(rollout_pb2.Task(rollout_id="r", sampling={"max_new_tokens": 1}))  # type: ignore[arg-type]
    assert task.languages == ("python",)
    assert pairs.SAMPLING.of(rollout_pb2.Sampling(temperature=0, max_new_tokens=5)) == Sampling(0, 1.0, 5, 0)
    assert pairs.LEASED_BATCH.of(broker_pb2.LeaseBatchResponse()).batch is None
    assert RunMode.PAUSED is pairs.MODE[pairs.MODE.of_member[RunMode.PAUSED]]


def test_headers_and_verdicts_in_fields_of_bytes_are_those_of_nested_messages() -> None:
    """So a batch or a header that an older version has kept can be read."""
    nested = b"\n" + bytes([len(pairs.HEADER.encode(HEADER))]) + pairs.HEADER.encode(HEADER)
    assert broker_pb2.GradedRollout(header=pairs.HEADER.encode(HEADER)).SerializeToString() == nested
    letter = broker_pb2.DeadLetter(header=pairs.HEADER.to(HEADER))
    assert pairs.HEADER.encode(HEADER) in letter.SerializeToString()
    assert DeadLetter in PAIRS
