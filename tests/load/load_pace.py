"""The request rate of an overload: a multiple of the capacity that the service has shown.

INVARIANT: the capacity never falls. It is at least every rate of verdicts that was sustained for `window_s` seconds.
The overload is therefore real even if the machine was busy when the capacity was first measured.
"""

from __future__ import annotations

from collections import deque

from tests.load.load_result import LoadPlan


class Pace:
    """The rate of all clients."""

    def __init__(self, plan: LoadPlan, capacity_per_second: float, window_s: float = 20.0) -> None:
        self.capacity_per_second = capacity_per_second
        self._plan = plan
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()  # (time, number of verdicts), for about one window

    def note(self, now_s: float, num_verdicts: int) -> None:
        """Record the number of all verdicts so far. Call it about once a second."""
        self._seen.append((now_s, num_verdicts))
        while len(self._seen) > 1 and now_s - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        then_s, num_then = self._seen[0]
        if now_s - then_s >= self._window_s:
            self.capacity_per_second = max(self.capacity_per_second, (num_verdicts - num_then) / (now_s - then_s))

    def per_second(self, client: int) -> float:
        """The current requests per second of the client with this index."""
        each = self._plan.overload * self.capacity_per_second / self._plan.num_clients
        return each * (self._plan.greed if client == 0 else 1.0)
