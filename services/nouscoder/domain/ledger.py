"""The conservation law: where every rollout ever admitted is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RolloutState(StrEnum):
    """The life of a rollout. The first seven are in flight; the last four are final.

    QUEUED -> SAMPLING -> SAMPLED -> GRADING -> GRADED -> (group complete) READY -> TRAINING -> TRAINED,
    with FILTERED or STALE instead of training, and ABANDONED from anywhere in flight. A lost lease leads back:
    SAMPLING -> QUEUED, GRADING -> SAMPLED, TRAINING stays until the batch is given again.
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
    """Counts at one instant. `in_flight` is counted from the live rollouts themselves, not from the totals."""

    admitted: int
    trained: int
    filtered: int
    stale: int
    abandoned: int
    in_flight: dict[str, int]

    @property
    def balanced(self) -> bool:
        """admitted = trained + filtered + stale + abandoned + in flight."""
        final = self.trained + self.filtered + self.stale + self.abandoned
        return self.admitted == final + sum(self.in_flight.values())
