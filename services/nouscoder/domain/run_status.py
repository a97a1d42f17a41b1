"""The state of a run at one time, as the broker reports it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nouscoder.domain.rollout import RolloutHeader


class RolloutState(StrEnum):
    """The life of a rollout. The first seven are in flight; the last five are final.

    QUEUED -> SAMPLING -> SAMPLED -> GRADING -> GRADED -> (group complete) READY -> TRAINING -> TRAINED,
    with FILTERED or STALE instead of training, and ABANDONED from any state in flight. A lost lease leads back:
    SAMPLING -> QUEUED, GRADING -> SAMPLED. TRAINING stays until the batch is leased again. A rollout is LOST when Redis
    forgot what became of it (docs/design/redis-loss.md).
    """

    QUEUED = "queued"
    SAMPLING = "sampling"
    SAMPLED = "sampled"
    GRADING = "grading"
    GRADED = "graded"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    ABANDONED = "abandoned"
    LOST = "lost"


IN_FLIGHT = (
    RolloutState.QUEUED,
    RolloutState.SAMPLING,
    RolloutState.SAMPLED,
    RolloutState.GRADING,
    RolloutState.GRADED,
    RolloutState.READY,
    RolloutState.TRAINING,
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The number of rollouts in each state, over all that were ever admitted.

    `in_flight` is counted from the rollouts in flight, not computed from the totals.
    """

    admitted: int
    trained: int
    filtered: int
    stale: int
    abandoned: int
    in_flight: dict[str, int]
    lost: int = 0

    @property
    def balanced(self) -> bool:
        """Whether admitted = trained + filtered + stale + abandoned + lost + in flight."""
        final = self.trained + self.filtered + self.stale + self.abandoned + self.lost
        return self.admitted == final + sum(self.in_flight.values())


# The ledger of a run that admits nothing, because it only evaluates.
NO_ROLLOUTS = Ledger(admitted=0, trained=0, filtered=0, stale=0, abandoned=0, in_flight={})


class RunMode(StrEnum):
    """The mode that an operator has set. Any mode may follow any other."""

    RUNNING = "running"
    DRAINING = "draining"  # nothing is admitted; rollouts in flight are finished
    PAUSED = "paused"  # nothing is leased; work under a lease may be submitted


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream of work (`tasks`, `grading`, `batches`), in entries.

    `lag` entries are waiting, `pending` are leased; `redeliveries` and `dead_letters` are totals of the run.
    """

    stream: str
    lag: int
    pending: int
    redeliveries: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class RunStatus:
    """All values are of the same time. `policy_version` is None before the first publication.

    `run_id` names the run folder that the state belongs to; empty until a learner has started. `back_pressure` says
    why rollouts are not admitted or not taken; empty when they are. `missing_problems` are gone from the problem file:
    how many rollouts of each were abandoned (some of them, when there are many). `cancelled` counts the rollouts that
    ended before they had a verdict, because their group or the run had ended, by LeaseLoss.

    Of the run's `num_problems` generation can make no rollout of `refused_problems`, which are not asked again;
    `refused_reason` is that of one of them. `left_out_problems` are not in `num_problems`: their prompts are too
    long, or they allow a language that the run has not. `all_retired` says that the curriculum has retired every
    problem for good, and nothing is in flight but rollouts that wait for a whole batch.
    """

    run: str
    ledger: Ledger
    streams: tuple[StreamStatus, ...]
    policy_version: int | None
    step: int
    batches_committed: int
    admission_slots_free: int
    finished: bool
    rollouts_accepted: int
    rollouts_graded: int
    run_id: str = ""
    back_pressure: str = ""
    missing_problems: dict[str, int] = field(default_factory=dict)
    mode: RunMode = RunMode.RUNNING
    cancelled: dict[str, int] = field(default_factory=dict)
    refused_problems: int = 0
    refused_reason: str = ""
    num_problems: int = 0
    left_out_problems: int = 0
    finish_reason: str = ""
    all_retired: bool = False

    @property
    def all_refused(self) -> bool:
        """Whether no problem is left to ask."""
        return 0 < self.num_problems <= self.refused_problems


class GivenUpFor(StrEnum):
    """Why a rollout became a dead letter."""

    DELIVERIES = "deliveries"  # its leases were lost too often
    PROGRESS = "progress"  # the same, and the last lease was lost because the work made no progress
    INTERNAL_ERROR = "internal_error"  # the infrastructure failed too often while grading it


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A rollout that was abandoned after too many failures. `stream` is where it failed: tasks or grading.

    `detail` describes the last failure. `header` is None and `record` empty for a rollout that was never sampled.
    """

    letter_id: str
    stream: str
    rollout_id: str
    problem_id: str
    group_id: str
    reason: GivenUpFor
    detail: str
    worker_id: str
    deliveries: int
    regrades: int
    age_s: float
    header: RolloutHeader | None
    record: str
