"""A dead letter: a rollout that was abandoned after too many failures, with its last failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.rollout import RolloutHeader


class GivenUpFor(StrEnum):
    """Why a rollout became a dead letter."""

    DELIVERIES = "deliveries"  # its leases were lost too often
    PROGRESS = "progress"  # the same, and the last lease was lost because the work made no progress
    INTERNAL_ERROR = "internal_error"  # the infrastructure failed too often while grading it


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`stream` is where it failed: tasks or grading. `detail` describes the last failure.

    `header` is None and `record` empty for a rollout that was never sampled.
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
