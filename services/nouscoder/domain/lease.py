"""A lease: a worker's right to work on one entry until it expires, and what is leased."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nouscoder.domain.batch import RecordedBatch
from nouscoder.domain.partial import PartialRollout
from nouscoder.domain.problem import GradingRules
from nouscoder.domain.rollout import Task


@dataclass(frozen=True, slots=True)
class Lease:
    """Lost when no heartbeat comes for `expires_in_s` seconds. `delivery` is 1 the first time the entry is leased."""

    lease_id: str
    expires_in_s: float
    delivery: int


class LeaseLoss(StrEnum):
    """Why a lease is lost. After the first three another worker gets the rollout; after the others it has ended."""

    EXPIRED = "expired"  # no heartbeat in time, a newer incarnation of the worker, or the work was submitted
    PROGRESS = "progress"  # the work made no progress
    RESTORED = "restored"  # Redis forgot a part of the state, which ended all earlier leases
    STALE = "stale"  # its group is too old for every future batch
    TOO_SMALL = "too_small"  # its group lost so many members that it cannot be trained on
    PROBLEM_GONE = "problem_gone"  # its problem is gone from the problem file
    REFUSED = "refused"  # no worker can make a rollout of its problem
    ABANDONED = "abandoned"  # its agent is gone
    FINISHED = "finished"  # the run is finished


@dataclass(frozen=True, slots=True)
class LeasedTask:
    """A rollout to sample.

    The broker keeps the first `num_kept_tokens` of an earlier delivery. `kept` are these tokens; None for whoever has
    not read them, and when there are none.
    """

    lease: Lease
    task: Task
    num_kept_tokens: int = 0
    kept: PartialRollout | None = None


@dataclass(frozen=True, slots=True)
class LeasedTasks:
    """Rollouts to sample; empty when none came in time. `run_finished`: none will ever come."""

    tasks: tuple[LeasedTask, ...] = ()
    run_finished: bool = False


@dataclass(frozen=True, slots=True)
class LeasedGrading:
    """A rollout to grade: `text` is the completion, `tests_digest` names the tests in the run's test store."""

    lease: Lease
    rollout_id: str
    problem_id: str
    text: str
    tests_digest: str
    rules: GradingRules


@dataclass(frozen=True, slots=True)
class RecordedGrading:
    """A rollout to grade before its text is read: it is in the record `record`.

    `header` is encoded, as the broker got it. Only the broker knows `rollout_id` apart from that.
    """

    lease: Lease
    header: bytes
    record: str
    tests_digest: str
    rules: GradingRules
    rollout_id: str = ""


@dataclass(frozen=True, slots=True)
class RecordedGradings:
    """Rollouts to grade; empty when none came in time. `run_finished`: none will ever come."""

    gradings: tuple[RecordedGrading, ...] = ()
    run_finished: bool = False


@dataclass(frozen=True, slots=True)
class LeasedGradings:
    """Rollouts to grade; empty when none came in time. `run_finished`: none will ever come."""

    gradings: tuple[LeasedGrading, ...] = ()
    run_finished: bool = False


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """A batch to train on; both None when none came in time. `run_finished`: none will ever come."""

    batch: RecordedBatch | None = None
    lease: Lease | None = None
    run_finished: bool = False


@dataclass(frozen=True, slots=True)
class WorkReport:
    """The progress of the work on leases. `paused`: a person has paused the worker.

    `progress`: by lease id, a number that changes when the work makes progress. `oldest_versions`: by lease id, for
    work that has sampled tokens, a policy version that is at least that of the oldest token.
    """

    progress: Mapping[str, int]
    paused: bool = False
    oldest_versions: Mapping[str, int] = field(default_factory=dict)


def worker_name(worker_id: str) -> str:
    """`worker_id` without its incarnation, the part after the last hyphen. A restart does not change the result."""
    return worker_id.rpartition("-")[0] or worker_id
