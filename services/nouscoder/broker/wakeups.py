"""Waking callers that wait for work, without polling Redis hot.

INVARIANT: a change fired after a caller looked wakes that caller, even if it had not begun to wait yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Answer = TypeVar("Answer")

# Changes made by another broker process on the same Redis are seen after so long.
LOOK_AGAIN_S = 0.5
MAX_WAIT_S = 30.0


class Signal:
    """One kind of change. Callers remember `changes`, look, and wait for a higher number."""

    def __init__(self) -> None:
        self.changes = 0
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake everyone."""
        self.changes += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait_past(self, seen: int, limit_s: float) -> None:
        """Return once `changes` is past `seen`, or after `limit_s` seconds."""
        if self.changes == seen:
            event = self._event
            try:
                async with asyncio.timeout(limit_s):
                    await event.wait()
            except TimeoutError:
                return


class Waits:
    """Every wait of the broker; `end` lets all of them answer at once, which a drain needs."""

    def __init__(self) -> None:
        self.tasks = Signal()
        self.grading = Signal()
        self.batches = Signal()
        self.policy = Signal()
        self.ended = False

    def end(self) -> None:
        """No wait lasts any longer."""
        self.ended = True
        for signal in (self.tasks, self.grading, self.batches, self.policy):
            signal.fire()

    async def until(
        self, signal: Signal, look: Callable[[], Awaitable[Answer]], enough: Callable[[Answer], bool], wait_s: float
    ) -> Answer:
        """Look again after each change until the answer is enough, for `wait_s` (at most MAX_WAIT_S) seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + min(max(wait_s, 0.0), MAX_WAIT_S)
        while True:
            seen = signal.changes
            answer = await look()
            left_s = end - loop.time()
            if enough(answer) or left_s <= 0 or self.ended:
                return answer
            await signal.wait_past(seen, min(left_s, LOOK_AGAIN_S))
