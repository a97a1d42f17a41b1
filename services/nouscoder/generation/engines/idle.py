"""Counts the seconds in which an engine decodes nothing.

INVARIANT: each second belongs to at most one reason, and is counted once.
"""

from __future__ import annotations

import time

from nouscoder.generation.metrics import GenerationMetrics, IdleReason


class IdleClock:
    """Takes each change of the reason, and adds the time between two changes to the reason's counter."""

    def __init__(self, metrics: GenerationMetrics) -> None:
        self._metrics = metrics
        self._reason: IdleReason | None = None
        self._since_s = time.monotonic()
        self._idle_s = 0.0

    def set(self, reason: IdleReason | None) -> None:
        """The reason from now on; None while tokens are decoded. Repeating the reason updates the counter."""
        now_s = time.monotonic()
        if self._reason is not None:
            self._idle_s += now_s - self._since_s
            self._metrics.idle_seconds.labels(self._reason.value).inc(now_s - self._since_s)
        self._reason, self._since_s = reason, now_s

    @property
    def idle_s(self) -> float:
        """Seconds so far, with the current pause."""
        return self._idle_s + (0.0 if self._reason is None else time.monotonic() - self._since_s)
