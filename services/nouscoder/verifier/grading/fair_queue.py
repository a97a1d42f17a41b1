"""Slots for submissions, shared fairly between clients.

INVARIANT: at most `num_slots` slots are taken and at most `max_waiting` submissions wait; while a client waits, any
other client gets at most one slot before it does (round robin); within a client the order is that of arrival. When the
queue is full, a client with less than its share of it gets a place and the newest of the client with the longest part
is refused in its stead. An extra slot is given only while a slot is idle and nobody waits, so nobody's turn is later
for one that was given after his arrival.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class QueueFull(Exception):
    """Too many submissions wait; try again in `retry_after_s` seconds."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full, try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class FairSlots:
    """`tell_load(waiting, busy)` hears of every change."""

    def __init__(self, num_slots: int, max_waiting: int, tell_load: Callable[[int, int], None]) -> None:
        self.num_slots = num_slots
        self.waiting = 0
        self.busy = 0
        self.extra = 0  # of the busy ones, those that are a second one of some submission
        self._max_waiting = max_waiting
        self._tell_load = tell_load
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the first one is next
        self._mean_s = 0.1
        tell_load(0, 0)

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """A slot for one submission of `client`. Raises QueueFull, at once or from its place in the queue."""
        await self._acquire(client)
        begun = time.monotonic()
        try:
            yield
        finally:
            self._mean_s += 0.1 * (time.monotonic() - begun - self._mean_s)
            self._release()

    def take_extra(self) -> bool:
        """Take one more slot for a submission that has one, to be given back soon after `waiting` rises; or not."""
        if self.waiting or self.busy >= self.num_slots:
            return False
        self.extra += 1
        self.busy += 1
        self._tell_load(self.waiting, self.busy)
        return True

    def give_back_extra(self) -> None:
        """Once for each time that `take_extra` was true."""
        self.extra -= 1
        self._release()

    async def _acquire(self, client: str) -> None:
        if self.busy < self.num_slots and not self.waiting:
            self.busy += 1
            self._tell_load(self.waiting, self.busy)
            return
        if self.waiting >= self._max_waiting:
            self._make_room(client)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(place)
        self._count_waiting(1)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._release()  # it was given a slot in the same moment
            else:
                self._leave(client, place)
            raise

    def _make_room(self, client: str) -> None:
        """Refuse somebody: `client`, unless another one has a much longer part of the queue."""
        own = len(self._queues.get(client, ()))
        longest = max(self._queues, key=lambda name: len(self._queues[name]), default=client)
        if longest == client or len(self._queues[longest]) <= own + 1:
            raise QueueFull(self._retry_after_s())
        place = self._queues[longest][-1]
        self._leave(longest, place)
        if not place.done():
            place.set_exception(QueueFull(self._retry_after_s()))

    def _leave(self, client: str, place: asyncio.Future[None]) -> None:
        queue = self._queues.get(client)
        if queue is None or place not in queue:
            return
        queue.remove(place)
        if not queue:
            del self._queues[client]
        self._count_waiting(-1)

    def _release(self) -> None:
        self.busy -= 1
        while self._queues:
            client, queue = self._queues.popitem(last=False)
            place = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind all others
            self._count_waiting(-1)
            if not place.done():
                self.busy += 1
                place.set_result(None)
                break
        self._tell_load(self.waiting, self.busy)

    def _count_waiting(self, change: int) -> None:
        self.waiting += change
        self._tell_load(self.waiting, self.busy)

    def _retry_after_s(self) -> int:
        """Whole seconds in which about half the queue should be gone."""
        return max(1, min(60, round(self.waiting / 2 * self._mean_s / self.num_slots)))
