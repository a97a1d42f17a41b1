"""Back-pressure while the memory of Redis fills: first no group is admitted, then no rollout is taken.

The rest of maxmemory is a reserve for grading, batches, commits, heartbeats and deletion, so that batches are trained
on and memory is freed. Redis runs their scripts even above maxmemory (store.py).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from nouscoder.broker.errors import BrokerError
from nouscoder.broker.store import Memory, Store
from nouscoder.broker.wakeups import Waits

log = logging.getLogger(__name__)

# Shares of maxmemory. Between the two is room for the rollouts of groups that were admitted before.
ADMIT_UP_TO = 0.75
TAKE_UP_TO = 0.9
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Pressure:
    """What follows from the memory that Redis uses. Without maxmemory there is no pressure."""

    memory: Memory = Memory(0, 0)

    @property
    def share(self) -> float:
        """The share of maxmemory in use; 0 when there is no limit."""
        return self.memory.used / self.memory.limit if self.memory.limit else 0.0

    @property
    def admits(self) -> bool:
        """New groups may be admitted."""
        return self.share <= ADMIT_UP_TO

    @property
    def takes(self) -> bool:
        """Sampled rollouts may be taken."""
        return self.share <= TAKE_UP_TO

    @property
    def reason(self) -> str:
        """What is refused and why, in one sentence; empty when nothing is."""
        if self.admits:
            return ""
        refused = "no group is admitted" if self.takes else "no group is admitted and no rollout is taken"
        used, limit = self.memory.used >> 20, self.memory.limit >> 20
        return (
            f"Redis uses {used} of its {limit} MiB (maxmemory): {refused} until batches are committed; if that lasts,"
            " give Redis more memory, lower broker.pipeline_k, or keep records elsewhere (broker.records.backend)"
        )


class MemoryWatch:
    """The pressure that was seen last. While Redis does not answer, there is none."""

    def __init__(self, store: Store) -> None:
        self.pressure = Pressure()
        self._store = store

    async def keep_watching(self, waits: Waits) -> None:
        """Look how full Redis is, until the broker stops."""
        while not waits.ended:
            try:
                pressure = Pressure(await self._store.memory())
            except BrokerError as error:  # Redis is away, or this account may not ask for its memory
                log.debug("the memory of Redis is unknown", extra={"reason": str(error)})
                pressure = Pressure()
            if bool(pressure.reason) != bool(self.pressure.reason):
                log.warning("back-pressure changed", extra={"reason": pressure.reason or "none"})
            self.pressure = pressure
            await asyncio.sleep(_LOOK_EVERY_S)
