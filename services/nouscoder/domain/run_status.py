"""The state of a run at one time, as the broker reports it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nouscoder.domain.ledger import Ledger


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
