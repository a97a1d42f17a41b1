"""A dead letter: a rollout that was given up, with what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.rollout import RolloutHeader


class GivenUpFor(StrEnum):
    """Why a rollout was given up."""

    DELIVERIES = "deliveries"  # its leases were lost too often
    PROGRESS = "progress"  # the same, and the last one was lost for want of progress
    INTERNAL_ERROR = "internal_error"  # grading it failed too often for reasons of ours


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`stream` is where it was given up: tasks or grading. `detail` is what is known of the last failure.

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
