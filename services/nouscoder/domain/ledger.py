"""The ledger: the number of rollouts in each state, over all that were ever admitted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RolloutState(StrEnum):
    """The life of a rollout. The first seven are in flight; the last five are final.

    QUEUED -> SAMPLING -> SAMPLED -> GRADING -> GRADED -> (group complete) READY -> TRAINING -> TRAINED,
    with FILTERED or STALE instead of training, and ABANDONED from any state in flight. A lost lease leads back:
    SAMPLING -> QUEUED, GRADING -> SAMPLED. TRAINING stays until the batch is leased again. A rollout is LOST when Redis
    forgot what became of it (docs/architecture.md, "When Redis forgets").
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
    """The counts at one time. `in_flight` is counted from the rollouts in flight, not computed from the totals."""

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
