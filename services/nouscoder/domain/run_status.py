"""The state of a run at one time, as the broker reports it."""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.domain.ledger import Ledger


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
    """All values are of the same time. `policy_version` is None before the first publication."""

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
    """One reason why the next step waits. `idle_s`: seconds without progress. An empty id means that there is none."""

    reason: str
    item_id: str
    worker_id: str
    idle_s: float
