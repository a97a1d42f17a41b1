"""What the learner is doing now, and since when."""

from __future__ import annotations

import time
from enum import StrEnum


class LearnerState(StrEnum):
    """STARTING -> (WAITING_FOR_BATCH <-> PAUSED -> TRAINING -> PUBLISHING -> CHECKPOINTING)* -> FINISHED.

    PUBLISHING and CHECKPOINTING last until the state is copied; the copies are written in the background.
    WAITING_FOR_EVALUATION comes after STARTING when learner.start_after names a file.
    """

    STARTING = "starting"
    WAITING_FOR_EVALUATION = "waiting_for_evaluation"
    WAITING_FOR_BATCH = "waiting_for_batch"
    TRAINING = "training"
    CHECKPOINTING = "checkpointing"
    PUBLISHING = "publishing"
    PAUSED = "paused"
    FINISHED = "finished"


class StateClock:
    """The learner's state and its age in seconds."""

    def __init__(self) -> None:
        self.state = LearnerState.STARTING
        self._since = time.monotonic()

    def enter(self, state: LearnerState) -> None:
        """Begin `state`."""
        self.state = state
        self._since = time.monotonic()

    @property
    def state_s(self) -> float:
        """Seconds since the state began."""
        return time.monotonic() - self._since
