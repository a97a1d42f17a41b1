"""Decides when the garbage collector looks at all values.

The event loop stands still meanwhile: for a third of a second when the requests in progress hold as many values as
they may. Left to itself the collector does this while they hold the most.

INVARIANT: while `run` runs, the interpreter starts no full collection itself. `run` makes one when the requests in
progress hold little, at most every EVERY_S, and after LATEST_S in any case.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from nouscoder.verifier.access.memory_budget import MemoryBudget

EVERY_S = 10.0
LATEST_S = 120.0
LITTLE_SHARE = 1 / 16  # of the memory budget
_NUM_SMALLER = 10  # as the interpreter has it
_LOOK_S = 1.0
_NEVER = (1 << 31) - 1


@dataclass(slots=True)
class FullCollections:
    """When the next one is due. Times are of one clock [s]."""

    last_s: float

    def is_due(self, now_s: float, held_share: float, num_smaller: int) -> bool:
        """`held_share`: how much of the memory budget requests hold. `num_smaller`: the collections of younger values
        since the last full one; a full one before some of them is in vain.
        """
        waited_s = now_s - self.last_s
        if num_smaller <= _NUM_SMALLER or waited_s < EVERY_S:
            return False
        return held_share <= LITTLE_SHARE or waited_s >= LATEST_S


async def run(budget: MemoryBudget, clock: Callable[[], float] = time.monotonic) -> None:
    """Look every second, for ever."""
    youngest, young, oldest = gc.get_threshold()
    gc.set_threshold(youngest, young, _NEVER)
    collections = FullCollections(clock())
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            if collections.is_due(clock(), budget.held_bytes / budget.budget_bytes, gc.get_count()[2]):
                gc.collect()
                collections.last_s = clock()
    finally:
        gc.set_threshold(youngest, young, oldest)
