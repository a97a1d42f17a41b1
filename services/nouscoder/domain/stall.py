"""The causes that stop a run, and the snapshot from which stall_judge.py finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.run_status import RunStatus


class StallCause(StrEnum):
    """Why the next batch does not come."""

    REDIS_FULL = "redis_full"
    REDIS_CANNOT_SAVE = "redis_cannot_save"
    REDIS_READ_ONLY = "redis_read_only"
    PAUSED = "paused"
    DRAINING = "draining"
    NO_POLICY = "no_policy"
    BATCH_HELD_BACK = "batch_held_back"
    LEARNER_CRASHES = "learner_crashes"
    LEARNER_SILENT = "learner_silent"
    LEARNER_SLOW = "learner_slow"
    LEARNER_ABSENT = "learner_absent"
    VERIFIER_ABSENT = "verifier_absent"
    VERIFIER_SILENT = "verifier_silent"
    VERIFIER_HUNG = "verifier_hung"
    INTERNAL_ERRORS = "internal_errors"
    GENERATION_ABSENT = "generation_absent"
    GENERATION_SILENT = "generation_silent"
    ENGINE_PAUSED = "engine_paused"
    ENGINE_HUNG = "engine_hung"
    ALL_FILTERED = "all_filtered"
    ALL_STALE = "all_stale"
    ALL_GIVEN_UP = "all_given_up"
    ADMISSION_CLOSED = "admission_closed"
    EMPTY_CURRICULUM = "empty_curriculum"
    LEASES_FAIL = "leases_fail"


@dataclass(frozen=True, slots=True)
class Blocker:
    """A cause, explained in a few sentences. `item_id` and `worker_id` name what has stood still longest, or are empty.

    `idle_s`: seconds since it last moved. `num_items`: how many rollouts or batches this cause holds up.
    """

    cause: StallCause
    reason: str
    item_id: str = ""
    worker_id: str = ""
    idle_s: float = 0.0
    num_items: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """A lease on a rollout. `silent_s`: seconds since its last heartbeat; `still_s`: since its last progress."""

    item_id: str
    worker_id: str
    held_s: float
    silent_s: float
    still_s: float
    delivery: int = 1
    paused: bool = False


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """The uncommitted batch. `delivery`: how many learners have leased it.

    `failures`: how often a learner reported that it cannot train on it; `failure`: the last report.
    """

    batch_id: int
    worker_id: str
    held_s: float
    silent_s: float
    delivery: int = 1
    failures: int = 0
    failure: str = ""
    held_back: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Rollouts counted since the last committed batch."""

    filtered: int = 0
    stale: int = 0
    abandoned: int = 0
    graded: int = 0
    accepted: int = 0
    internal_errors: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that `judge` needs. Streams are tasks, grading and batches. Times are in seconds.

    `since_commit_s`: since the last committed batch, or since the first admission. `usual_batch_s`: the median time of
    the last batches, 0 before there are two. `asked_s`: by stream, since a worker last asked for work; absent: never.
    `lease_s` and `batch_lease_s` are the lengths of leases. A batch has `batch_groups` groups of `group_size` rollouts.
    """

    status: RunStatus
    since_commit_s: float
    usual_batch_s: float
    since: Totals
    sampling: tuple[Holder, ...]
    grading: tuple[Holder, ...]
    batch: HeldBatch | None
    ready_groups: int
    asked_s: Mapping[str, float]
    num_problems: int
    lease_s: float
    batch_lease_s: float
    batch_groups: int
    group_size: int
    redis_faults: tuple[StallCause, ...] = ()
