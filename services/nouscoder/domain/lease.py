"""A lease: a worker's right to work on one entry until it expires, and what is leased."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nouscoder.domain.batch import RecordedBatch
from nouscoder.domain.problem import GradingRules
from nouscoder.domain.rollout import RolloutHeader, Task


@dataclass(frozen=True, slots=True)
class Lease:
    """Lost when no heartbeat comes for `expires_in_s` seconds. `delivery` is 1 the first time the entry is given."""

    lease_id: str
    expires_in_s: float
    delivery: int


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
    """How far the work on leases is: by lease id a number that changes when the work moves. `paused`: by a person."""

    progress: Mapping[str, int]
    paused: bool = False


def worker_name(worker_id: str) -> str:
    """`worker_id` without its incarnation, which is what follows the last hyphen: the same over restarts."""
    return worker_id.rpartition("-")[0] or worker_id
