"""The state of a run at one instant, as the broker tells it."""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.domain.ledger import Ledger


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream of work (`tasks`, `grading`, `batches`), in entries.

    `lag` nobody holds, `pending` are under lease; `redeliveries` and `dead_letters` are counted over the run.
    """

    stream: str
    lag: int
    pending: int
    redeliveries: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Everything was read at the same instant. `policy_version` is None while none has been published."""

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


@dataclass(frozen=True, slots=True)
class Blocker:
    """One thing that holds the next step up. `idle_s`: seconds since it last moved. Empty ids: there is none."""

    reason: str
    item_id: str
    worker_id: str
    idle_s: float
