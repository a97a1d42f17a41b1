"""Every record that travels, beside its message.

`TASK.to(record)` is the message, `TASK.of(message)` the record. `encode` and `decode` go to and from bytes, which are
also the form in which Redis keeps headers, verdicts and manifests, and the learner's disk a batch. Fields are converted
by name (convert.py). A field whose name or meaning differs is listed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from operator import attrgetter, not_
from typing import Any

from pydantic import ValidationError

from nouscoder.domain.batch import CompletedGroups, EncodedBatch, EncodedRollout, RecordedBatch, RecordedRollout
from nouscoder.domain.conversation import InterpreterAnswer
from nouscoder.domain.curriculum import CurriculumState, GroupOutcome, ProblemStatistics
from nouscoder.domain.learner_state import Restored, RunIdentity, TrainedGroups, TrainedState
from nouscoder.domain.lease import Lease, LeasedBatch, LeasedTask, LeasedTasks, RecordedGrading, RecordedGradings
from nouscoder.domain.partial import EncodedPiece
from nouscoder.domain.policy import PolicyDelta, PolicyManifest, Shard
from nouscoder.domain.problem import GradingRules, PublicTests
from nouscoder.domain.rollout import RolloutHeader, Sampling, Task
from nouscoder.domain.run_status import DeadLetter, Ledger, RunMode, RunStatus, StreamStatus
from nouscoder.domain.stall import Blocker
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
from nouscoder.domain.verdict import FirstFailure, TestOutcome, Verdict
from nouscoder.errors import why_unreadable
from nouscoder.formats.body import TestsReferenceBody, canonical_json, first_fault, tests_from_json, tests_from_record
from nouscoder.rpc.convert import CODECS, NOT_SENT, UNSET, Exceptional, InvalidMessage, Numbers, WirePair
from nouscoder.store.record_store import ByteRange
from nouscoder.v1 import broker_pb2, policy_pb2, rollout_pb2, verdict_pb2, verifier_pb2

# The tests of a submission. The clients of this project send the JSON form of tests (nouscoder.formats.body), or a
# digest. Clients in other languages may fill the single fields of the protocol. These are converted to the JSON form,
# so that the rules for tests are in one place.

# Cases must have these, and protobuf does not tell an empty text from one that is not set.
_MAY_BE_EMPTY = ("input", "output", "expected")


def _tests_to(tests: Tests | TestsReference) -> verdict_pb2.Tests:
    if isinstance(tests, TestsReference):
        return verdict_pb2.Tests(digest=tests.digest)
    return verdict_pb2.Tests(json=canonical_json(tests))


@contextmanager
def _naming_fields() -> Iterator[None]:
    """Raises InvalidMessage naming the field at fault."""
    try:
        yield
    except ValidationError as error:
        field, wrong = first_fault(error, "tests")
        raise InvalidMessage(f"{field}: {wrong}") from None


@_naming_fields()
def tests_from_text(text: bytes | str) -> Tests:
    """The JSON form -> domain. Raises InvalidMessage naming the field at fault."""
    return tests_from_json(text)


@_naming_fields()
def tests_from(message: verdict_pb2.Tests) -> Tests | TestsReference:
    """Protocol -> domain. Raises InvalidMessage naming the field at fault."""
    match message.WhichOneof("kind"):
        case "json":
            return tests_from_json(message.json)
        case "digest":
            return TestsReferenceBody(digest=message.digest).record()
        case None:
            raise InvalidMessage("tests has none of stdin, call, asserts, checker, interactive, math, json, digest")
        case "call":
            cases = [_call(case, f"tests.call.cases[{i}]") for i, case in enumerate(message.call.cases)]
            call = message.call
            record = {"type": "call", "entry_point": call.entry_point, "setup": call.setup, "wrapped": call.wrapped}
            return tests_from_json(json.dumps({**record, "cases": cases}))
        case kind:
            name = "assert" if kind == "asserts" else kind
            return tests_from_record({"type": name, **_fields(getattr(message, kind))})


def _fields(message: Any) -> dict[str, Any]:
    """The fields that are set, and those that may be empty texts."""
    found: dict[str, Any] = {name: "" for name in _MAY_BE_EMPTY if name in message.DESCRIPTOR.fields_by_name}
    for field, value in message.ListFields():
        change = _fields if field.type == field.TYPE_MESSAGE else lambda one: one
        found[field.name] = list(map(change, value)) if field.is_repeated else change(value)
    return found


def _call(message: verdict_pb2.CallCase, field: str) -> dict[str, Any]:
    record = {}
    for name, absent in (("args", "[]"), ("kwargs", "{}"), ("expected", "null")):
        try:
            record[name] = json.loads(getattr(message, f"{name}_json") or absent)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage(f"{field}.{name}_json is not JSON: {why_unreadable(error)}") from error
    return record


def _zero_is(name: str, usual: object) -> Exceptional:
    """A field in which 0 means the usual value."""
    return Exceptional(name, of=lambda sent: sent or usual)


def _whole_tests(message: verdict_pb2.Tests) -> Tests:
    tests = tests_from(message)
    if isinstance(tests, TestsReference):
        raise InvalidMessage("tests must be the tests themselves, not a digest")
    return tests


class _SubmissionPair(WirePair[Submission, verdict_pb2.Submission]):
    def of(self, message: verdict_pb2.Submission, **given: object) -> Submission:
        if message.WhichOneof("source") is None:
            raise InvalidMessage("submission has neither code nor completion")
        return super().of(message, **given)


UNSET |= {ComparatorKind: ComparatorKind.TOKENS, Profile: Profile.PROCESS, Prelude: Prelude.NONE}
CODECS |= {
    Tests: (_tests_to, _whole_tests),
    Tests | TestsReference: (_tests_to, tests_from),
    TrainedGroups: (attrgetter("bits"), TrainedGroups),
}

# Messages of earlier versions name none.
_LANGUAGES = Exceptional("languages", of=lambda names: tuple(names) or GradingRules().languages)

LIMITS = WirePair(
    Limits, verdict_pb2.Limits, **{name: _zero_is(name, usual) for name, usual in asdict(Limits()).items()}
)
COMPARATOR = WirePair(Comparator, verdict_pb2.Comparator)
RULES = WirePair(GradingRules, verdict_pb2.GradingRules, languages=_LANGUAGES)
SUBMISSION = _SubmissionPair(
    Submission,
    verdict_pb2.Submission,
    language=Exceptional("language", of=lambda name: language_name(name or "python")),
    stop_on_first_failure=Exceptional("run_all_tests", not_, not_),
    other_languages=Exceptional("other_languages", of=lambda names: tuple(map(language_name, names))),
    reveal=Exceptional("withhold_failure", not_, not_),
    stderr=Exceptional("with_stderr"),
    tests_digest=NOT_SENT,
)
OUTCOME = WirePair(TestOutcome, verdict_pb2.TestOutcome)
FIRST_FAILURE = WirePair(FirstFailure, verdict_pb2.FirstFailure)
VERDICT = WirePair(Verdict, verdict_pb2.Verdict)
ANSWER = WirePair(InterpreterAnswer, verifier_pb2.InterpretResponse)

SAMPLING = WirePair(Sampling, rollout_pb2.Sampling, top_p=_zero_is("top_p", 1.0))
PUBLIC_TESTS = WirePair(PublicTests, rollout_pb2.PublicTests)
TASK = WirePair(Task, rollout_pb2.Task, languages=_LANGUAGES)
HEADER = WirePair(RolloutHeader, rollout_pb2.RolloutHeader)

SHARD = WirePair(Shard, policy_pb2.PolicyShard)
DELTA = WirePair(PolicyDelta, policy_pb2.PolicyDelta)
MANIFEST = WirePair(PolicyManifest, policy_pb2.PolicyManifest)

LEASE = WirePair(Lease, broker_pb2.Lease)
LEASED_TASK = WirePair(LeasedTask, broker_pb2.LeasedTask, kept=NOT_SENT)
LEASED_TASKS = WirePair(LeasedTasks, broker_pb2.LeaseTasksResponse)
PIECE = WirePair(EncodedPiece, broker_pb2.PartialPiece)
LEASED_GRADING = WirePair(RecordedGrading, broker_pb2.LeasedGrading, rollout_id=NOT_SENT)
LEASED_GRADINGS = WirePair(RecordedGradings, broker_pb2.LeaseGradingResponse)
RANGE = WirePair(ByteRange, broker_pb2.RecordRange, name=Exceptional("record"))
# The broker passes on the bytes of headers and verdicts; the learner reads them.
PASSED_ROLLOUT = WirePair(EncodedRollout, broker_pb2.GradedRollout)
COMPLETED = WirePair(CompletedGroups, broker_pb2.CompletedGroups)
PASSED_BATCH = WirePair(EncodedBatch, broker_pb2.Batch)
GRADED_ROLLOUT = WirePair(RecordedRollout, broker_pb2.GradedRollout)
BATCH = WirePair(RecordedBatch, broker_pb2.Batch, index=NOT_SENT)
LEASED_BATCH = WirePair(LeasedBatch, broker_pb2.LeaseBatchResponse)

GROUP_OUTCOME = WirePair(GroupOutcome, broker_pb2.GroupOutcome)
STATISTICS = WirePair(ProblemStatistics, broker_pb2.ProblemStatistics)
CURRICULUM = WirePair(CurriculumState, broker_pb2.CurriculumState)
IDENTITY = WirePair(RunIdentity, broker_pb2.RunIdentity)
TRAINED_STATE = WirePair(TrainedState, broker_pb2.RestoreRunRequest)
RESTORED = WirePair(Restored, broker_pb2.RestoreRunResponse)

MODE = Numbers(RunMode, broker_pb2.RunMode.DESCRIPTOR, "mode")
LEDGER = WirePair(Ledger, broker_pb2.Ledger)
STREAM = WirePair(StreamStatus, broker_pb2.StreamStatus)
STATUS = WirePair(RunStatus, broker_pb2.StatusResponse)
BLOCKER = WirePair(Blocker, broker_pb2.Blocker)
DEAD_LETTER = WirePair(DeadLetter, broker_pb2.DeadLetter)
