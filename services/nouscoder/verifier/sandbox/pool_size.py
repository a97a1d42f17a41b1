"""How many slots of a pool have a runner: enough for the demand of now and of the last `idle_s` seconds.

INVARIANT: the size is never below the demand of now within `least` and `most`, it shrinks only when the demand has been
lower for `idle_s` seconds, and with `least` 0 it then reaches 0, spares included. Time is given, so it is pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Wanted:
    """Slots with a runner, and runners that are kept ready beside them."""

    slots: int
    spares: int


@dataclass(slots=True)
class PoolSize:
    """`always` slots are kept beside those of the demand. A pool with `least` = `most` has a constant size."""

    least: int
    most: int
    spares: int
    idle_s: float
    always: int = 0
    # (since when, demand), falling: each ends where the next begins.
    _levels: deque[tuple[float, int]] = field(default_factory=deque, init=False)

    def observe(self, demand: int, now_s: float) -> None:
        """From `now_s` on, `demand` submissions wait or run."""
        since_s = now_s
        while self._levels and self._levels[-1][1] <= demand:
            since_s, _ = self._levels.pop()  # the level before still ends where the removed one began
        self._levels.append((since_s, demand))

    def wanted(self, now_s: float) -> Wanted:
        """The size from now on."""
        while len(self._levels) > 1 and self._levels[1][0] <= now_s - self.idle_s:
            self._levels.popleft()
        demand = self._levels[0][1] if self._levels else 0
        slots = min(self.most, max(self.least, demand))
        return Wanted(self.always + slots, self.spares if slots else 0)
