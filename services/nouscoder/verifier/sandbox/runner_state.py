"""One runner of a pool, its states, and the reasons for which it is replaced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.verifier.sandbox.runner_source import Found


class RunnerState(StrEnum):
    """The state of a runner; pool.py shows the transitions."""

    STARTING = "starting"
    UNPROVEN = "unproven"
    READY = "ready"
    LENT = "lent"
    QUARANTINED = "quarantined"


class Replaced(StrEnum):
    """The reason for which a runner was replaced."""

    WORN = "worn"
    LOST = "lost"
    STUCK = "stuck"
    CANARY = "canary"
    SILENT = "silent"
    KERNEL = "kernel"
    KEY = "key"


@dataclass(slots=True)
class Runner:
    """One runner in the pool."""

    name: str
    address: tuple[str, int] | None
    state: RunnerState
    since_s: float
    silent_proofs: int = 0
    use_until_s: float = math.inf
    is_outdated: bool = False  # it is replaced as soon as no slot has it

    @property
    def found(self) -> Found:
        """The runner in the form that the source takes."""
        return Found(self.name, self.address)
