"""Every record that travels, beside its message.

`TASK.to(record)` is the message, `TASK.of(message)` the record. `encode` and `decode` go to and from bytes, which are
also the form in which Redis keeps headers, verdicts and manifests, and the learner's disk a batch. Fields are converted
by name (convert.py). A field whose name or meaning differs is listed here.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from operator import attrgetter, not_

from nouscoder.domain.batch import EncodedBatch, EncodedRollout, RecordedBatch, RecordedRollout
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
from nouscoder.rpc.convert import CODECS, NOT_SENT, UNSET, Exceptional, InvalidMessage, Numbers, Pair
from nouscoder.rpc.tests_convert import tests_from, tests_to
from nouscoder.store.record_store import ByteRange
from nouscoder.v1 import broker_pb2, policy_pb2, rollout_pb2, verdict_pb2, verifier_pb2


def _zero_is_default(record: object) -> dict[str, Exceptional]:
    """In each field a 0 means the value of `record`."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}  # type: ignore[arg-type]
    return {name: Exceptional(name, of=partial(_or, usual)) for name, usual in values.items()}


def _or(usual: object, sent: object) -> object:
    return sent or usual


def _whole_tests(message: verdict_pb2.Tests) -> Tests:
    tests = tests_from(message)
    if isinstance(tests, TestsReference):
        raise InvalidMessage("tests must be the tests themselves, not a digest")
    return tests


class _SubmissionPair(Pair[Submission, verdict_pb2.Submission]):
    def of(self, message: verdict_pb2.Submission, **given: object) -> Submission:
        if message.WhichOneof("source") is None:
            raise InvalidMessage("submission has neither code nor completion")
        return super().of(message, **given)


UNSET |= {ComparatorKind: ComparatorKind.TOKENS, Profile: Profile.PROCESS, Prelude: Prelude.NONE}
CODECS |= {
    Tests: (tests_to, _whole_tests),
    Tests | TestsReference: (tests_to, tests_from),
    TrainedGroups: (attrgetter("bits"), TrainedGroups),
}

LIMITS = Pair(Limits, verdict_pb2.Limits, **_zero_is_default(Limits()))
COMPARATOR = Pair(Comparator, verdict_pb2.Comparator)
RULES = Pair(GradingRules, verdict_pb2.GradingRules)
SUBMISSION = _SubmissionPair(
    Submission,
    verdict_pb2.Submission,
    language=Exceptional("language", of=lambda name: language_name(name or "python")),
    stop_on_first_failure=Exceptional("run_all_tests", not_, not_),
    reveal=Exceptional("withhold_failure", not_, not_),
    stderr=Exceptional("with_stderr"),
    tests_digest=NOT_SENT,
)
OUTCOME = Pair(TestOutcome, verdict_pb2.TestOutcome)
FIRST_FAILURE = Pair(FirstFailure, verdict_pb2.FirstFailure)
VERDICT = Pair(Verdict, verdict_pb2.Verdict)
ANSWER = Pair(InterpreterAnswer, verifier_pb2.InterpretResponse)

SAMPLING = Pair(Sampling, rollout_pb2.Sampling, top_p=Exceptional("top_p", of=partial(_or, 1.0)))
PUBLIC_TESTS = Pair(PublicTests, rollout_pb2.PublicTests)
TASK = Pair(Task, rollout_pb2.Task)
HEADER = Pair(RolloutHeader, rollout_pb2.RolloutHeader)

SHARD = Pair(Shard, policy_pb2.PolicyShard)
DELTA = Pair(PolicyDelta, policy_pb2.PolicyDelta)
MANIFEST = Pair(PolicyManifest, policy_pb2.PolicyManifest)

LEASE = Pair(Lease, broker_pb2.Lease)
LEASED_TASK = Pair(LeasedTask, broker_pb2.LeasedTask, kept=NOT_SENT)
LEASED_TASKS = Pair(LeasedTasks, broker_pb2.LeaseTasksResponse)
PIECE = Pair(EncodedPiece, broker_pb2.PartialPiece)
LEASED_GRADING = Pair(RecordedGrading, broker_pb2.LeasedGrading, rollout_id=NOT_SENT)
LEASED_GRADINGS = Pair(RecordedGradings, broker_pb2.LeaseGradingResponse)
RANGE = Pair(ByteRange, broker_pb2.RecordRange, name=Exceptional("record"))
# The broker passes on the bytes of headers and verdicts; the learner reads them.
PASSED_ROLLOUT = Pair(EncodedRollout, broker_pb2.GradedRollout)
PASSED_BATCH = Pair(EncodedBatch, broker_pb2.Batch)
GRADED_ROLLOUT = Pair(RecordedRollout, broker_pb2.GradedRollout)
BATCH = Pair(RecordedBatch, broker_pb2.Batch, index=NOT_SENT)
LEASED_BATCH = Pair(LeasedBatch, broker_pb2.LeaseBatchResponse)

GROUP_OUTCOME = Pair(GroupOutcome, broker_pb2.GroupOutcome)
STATISTICS = Pair(ProblemStatistics, broker_pb2.ProblemStatistics)
CURRICULUM = Pair(CurriculumState, broker_pb2.CurriculumState)
IDENTITY = Pair(RunIdentity, broker_pb2.RunIdentity)
TRAINED_STATE = Pair(TrainedState, broker_pb2.RestoreRunRequest)
RESTORED = Pair(Restored, broker_pb2.RestoreRunResponse)

MODE = Numbers(RunMode, broker_pb2.RunMode.DESCRIPTOR, "mode")
LEDGER = Pair(Ledger, broker_pb2.Ledger)
STREAM = Pair(StreamStatus, broker_pb2.StreamStatus)
STATUS = Pair(RunStatus, broker_pb2.StatusResponse)
BLOCKER = Pair(Blocker, broker_pb2.Blocker)
DEAD_LETTER = Pair(DeadLetter, broker_pb2.DeadLetter)
