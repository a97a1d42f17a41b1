"""The state of a run at one time, read by the watch and shown by the views."""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.domain.ledger import Ledger


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """One process of a local run. `state` is a word such as running, restarting, stopped."""

    name: str
    state: str
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the run at one time. Unknown values are None.

    `pass_rates` [batches] are those of the batches so far, oldest first.
    """

    phase: str
    batch: int = 0
    total_batches: int = 0
    step: int = 0
    total_steps: int = 0
    pass_rate: float | None = None
    reward_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    tests_per_second: float | None = None
    tokens_per_second: float | None = None
    policy_version: int | None = None
    ledger: Ledger | None = None
    time_left_s: float | None = None
    elapsed_s: float = 0.0
    processes: tuple[ProcessLine, ...] = ()
    learner_state: str = ""
    message: str = ""
    pass_rates: tuple[float, ...] = ()
