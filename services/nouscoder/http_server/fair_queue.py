"""Queues: slots for submissions, shared fairly between clients, and one thread for works that hold the interpreter.

INVARIANT: at most `usable` slots are taken (more only after it has shrunk) and at most `max_waiting` submissions wait.
Slots go round robin over the waiting clients, so that any other client gets at most one slot before a waiting client
does. The submissions of one client are served in order of arrival. When the queue is full, a client with less than its
share still gets a place, and the newest submission of the client with the most waiting ones is refused. An extra slot
is given only while a slot is idle and no submission waits, so that it delays no submission that is already there.

Submissions of jobs (`in_background`) have a round of their own. While others wait, they get one of JOB_TURN slots, so
that they neither delay others nor starve. A full queue refuses them first.

At most one work of a OneThread is in progress. A work that has not begun after PATIENCE_S, or whose caller has gone,
never begins. Each call of a decoder or encoder keeps the interpreter for up to a tenth of a second, and the event loop
would wait for those of several threads, one after the other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

JOB_TURN = 10
PATIENCE_S = 60.0
_RETRY_AFTER_S = 5  # for a work that has not begun
Result = TypeVar("Result")

_Place = asyncio.Future[None]
_Queues = OrderedDict[str, deque[_Place]]  # by client; the first client is next


class QueueFull(Exception):
    """The queue is full. The client should try again after `retry_after_s` seconds."""

    def __init__(self, retry_after_s: int, message: str = "") -> None:
        super().__init__(message or f"the queue is full, try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class FairSlots:
    """Hands out slots. `report_load(waiting, busy)` is called at every change, `report_wait(seconds)` for each slot."""

    def __init__(
        self,
        num_slots: int,
        max_waiting: int,
        report_load: Callable[[int, int], None],
        report_wait: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.num_slots = num_slots
        self.usable = num_slots  # fewer while slots have nothing to run on; see resize
        self.waiting = 0
        self.busy = 0
        self.extra = 0  # busy slots that a submission holds in addition to its first one
        self._max_waiting = max_waiting
        self._report_load = report_load
        self._report_wait = report_wait
        self._asked_s: OrderedDict[_Place, float] = OrderedDict()  # of those that wait, oldest first
        self._queues: _Queues = OrderedDict()
        self._jobs: _Queues = OrderedDict()
        self._since_job = 0  # slots given to others since the last one of a job
        self._mean_s = 0.1
        report_load(0, 0)

    @asynccontextmanager
    async def slot(
        self, client: str, patience_s: float = math.inf, *, in_background: bool = False
    ) -> AsyncIterator[None]:
        """A slot for one submission of `client`.

        Raises QueueFull, at once, later while it waits, or after it has waited `patience_s` seconds.
        """
        asked = time.monotonic()
        try:
            async with asyncio.timeout(patience_s if patience_s < math.inf else None):
                await self._acquire(client, in_background)
        except TimeoutError:
            raise QueueFull(self._retry_after_s()) from None
        begun = time.monotonic()
        self._report_wait(begun - asked)
        try:
            yield
        finally:
            self._mean_s += 0.1 * (time.monotonic() - begun - self._mean_s)
            self._release()

    @property
    def oldest_s(self) -> float:
        """Seconds that the oldest waiting submission has waited; 0 when none waits."""
        return time.monotonic() - next(iter(self._asked_s.values())) if self._asked_s else 0.0

    @property
    def num_clients(self) -> int:
        """Clients with a waiting submission."""
        return len(self._queues.keys() | self._jobs.keys())

    def take_extra(self) -> bool:
        """Take an extra slot for a submission that has one. Returns False when none is free.

        The taker must give it back soon after `waiting` rises.
        """
        if self.waiting or self.busy >= self.usable:
            return False
        self.extra += 1
        self.busy += 1
        self._report_load(self.waiting, self.busy)
        return True

    def resize(self, usable: int) -> None:
        """Let only `usable` of the slots be taken from now on. Slots that are taken stay so."""
        self.usable = min(usable, self.num_slots)
        self._serve()

    def give_back_extra(self) -> None:
        """Give one extra slot back. Call it once for each successful `take_extra`."""
        self.extra -= 1
        self._release()

    async def _acquire(self, client: str, in_background: bool) -> None:
        if self.busy < self.usable and not self.waiting:
            self.busy += 1
            self._report_load(self.waiting, self.busy)
            return
        if self.waiting >= self._max_waiting:
            self._make_room(client, in_background)
        place: _Place = asyncio.get_running_loop().create_future()
        queues = self._jobs if in_background else self._queues
        queues.setdefault(client, deque()).append(place)
        self._asked_s[place] = time.monotonic()
        self._count_waiting(1)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._release()  # a slot was assigned just before the cancellation
            else:
                self._leave(queues, client, place)
            raise

    def _make_room(self, client: str, in_background: bool) -> None:
        """Refuse one submission: one of a job, or of the client with the most, or that of `client`. Raises QueueFull.

        Another client's submission is refused only if it has at least two more waiting than `client`.
        """
        if self._jobs and not in_background:
            self._refuse_newest(self._jobs, next(reversed(self._jobs)))
            return
        own = len(self._queues.get(client, ()))
        longest = max(self._queues, key=lambda name: len(self._queues[name]), default=client)
        if in_background or longest == client or len(self._queues[longest]) <= own + 1:
            raise QueueFull(self._retry_after_s())
        self._refuse_newest(self._queues, longest)

    def _refuse_newest(self, queues: _Queues, client: str) -> None:
        place = queues[client][-1]
        self._leave(queues, client, place)
        if not place.done():
            place.set_exception(QueueFull(self._retry_after_s()))

    def _leave(self, queues: _Queues, client: str, place: _Place) -> None:
        queue = queues.get(client)
        if queue is None or place not in queue:
            return
        queue.remove(place)
        del self._asked_s[place]
        if not queue:
            del queues[client]
        self._count_waiting(-1)

    def _release(self) -> None:
        self.busy -= 1
        self._serve()

    def _serve(self) -> None:
        while (self._queues or self._jobs) and self.busy < self.usable:
            # Take the place that is next out of its queue.
            is_job = bool(self._jobs) and (not self._queues or self._since_job >= JOB_TURN - 1)
            self._since_job = 0 if is_job else self._since_job + 1
            queues = self._jobs if is_job else self._queues
            client, queue = queues.popitem(last=False)
            place = queue.popleft()
            del self._asked_s[place]
            if queue:
                queues[client] = queue  # to the end of the round
            self._count_waiting(-1)
            if not place.done():
                self.busy += 1
                place.set_result(None)
        self._report_load(self.waiting, self.busy)

    def _count_waiting(self, change: int) -> None:
        self.waiting += change
        self._report_load(self.waiting, self.busy)

    def _retry_after_s(self) -> int:
        """Whole seconds until about half of the queue should be served."""
        return max(1, min(60, round(self.waiting / 2 * self._mean_s / self.num_slots)))


@dataclass(slots=True)
class _Pending(Generic[Result]):
    """A work whose result is awaited."""

    future: Future[Result]
    is_late: bool = False

    def give_up(self) -> None:
        """Cancel it unless it has begun."""
        self.is_late = self.future.cancel()


class OneThread:
    """Works wait in the order of the calls. `waits` is their number and the seconds that they waited."""

    def __init__(self, name: str, patience_s: float = PATIENCE_S) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._patience_s = patience_s
        self.waits = (0, 0.0)

    async def run(self, act: Callable[..., Result], *arguments: object) -> Result:
        """The result of `act`. Raises what it raises, and QueueFull when it has not begun after the patience."""
        called_s = time.monotonic()

        def work() -> Result:
            num, waited_s = self.waits  # only this thread writes it
            self.waits = (num + 1, waited_s + time.monotonic() - called_s)
            return act(*arguments)

        pending = _Pending(self._executor.submit(work))
        late = asyncio.get_running_loop().call_later(self._patience_s, pending.give_up)
        try:
            return await asyncio.wrap_future(pending.future)
        except asyncio.CancelledError:
            if pending.is_late:
                raise QueueFull(_RETRY_AFTER_S) from None
            raise
        finally:
            late.cancel()
            del pending.future  # it holds the error, whose traceback holds this frame
