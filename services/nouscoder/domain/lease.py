"""A lease: a worker's right to work on one entry until it expires, and what is leased."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nouscoder.domain.batch import RecordedBatch
from nouscoder.domain.problem import GradingRules
from nouscoder.domain.rollout import RolloutHeader, Task


@dataclass(frozen=True, slots=True)
class Lease:
    """Lost when no heartbeat comes for `expires_in_s` seconds. `delivery` is 1 the first time the entry is given."""

    lease_id: str
    expires_in_s: float
    delivery: int


class LeaseLoss(StrEnum):
    """Why a lease is lost. Of the first three the rollout goes to another worker; of the others it has ended."""

    EXPIRED = "expired"  # no heartbeat in time, a newer incarnation of the worker, or the work is submitted already
    PROGRESS = "progress"  # the work stood still
    RESTORED = "restored"  # Redis forgot a part, and all leases of before ended
    STALE = "stale"  # its group is too old for every batch to come
    TOO_SMALL = "too_small"  # its group lost so many members that it cannot be trained on
    PROBLEM_GONE = "problem_gone"  # its problem is gone from the problem file
    FINISHED = "finished"  # the run is finished


@dataclass(frozen=True, slots=True)
class LeasedTask:
    """A rollout to sample."""

    lease: Lease
    task: Task


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
    """A rollout to grade before its text is read: it is in the record `record`."""

    lease: Lease
    header: RolloutHeader
    record: str
    tests_digest: str
    rules: GradingRules

    @property
    def rollout_id(self) -> str:
        """Which rollout."""
        return self.header.rollout_id


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
    """How far the work on leases is: by lease id a number that changes when the work moves. `paused`: by a person.

    `oldest_versions`: of work that has sampled tokens, by lease id a policy version that the oldest of them is not
    newer than.
    """

    progress: Mapping[str, int]
    paused: bool = False
    oldest_versions: Mapping[str, int] = field(default_factory=dict)


def worker_name(worker_id: str) -> str:
    """`worker_id` without its incarnation, which is what follows the last hyphen: the same over restarts."""
    return worker_id.rpartition("-")[0] or worker_id
