"""Places of tool sessions, shared between clients.

A free place goes to the waiting client with the fewest open sessions; between equals, to the one that waits longest.

INVARIANT: at most `num_places` places are taken and at most `max_waiting` sessions wait. A session is told to end only
while no call of it runs, and only for a client that waits and has fewer sessions than its own client:
- at least two fewer: `safe_s` seconds after the session began;
- fewer: when it has had no call for `long_idle_s` seconds;
- none: when it is `long_open_s` seconds old.
No more sessions are told to end than clients wait for, and for one client at most one in `safe_s` seconds, so that a
client that comes and goes does not end the sessions of others again and again. So a client without a session gets one
`long_open_s` seconds and one call after the places were taken, whatever the others do. Until then its wait depends on
how the others call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from nouscoder.http_server.fair_queue import QueueFull

_LOOK_EVERY_S = 1.0
_RETRY_AFTER_S = 30


@dataclass(frozen=True, slots=True)
class Sharing:
    """When a session must give its place to another client [s]. See the module."""

    safe_s: float = 10.0
    long_idle_s: float = 60.0
    long_open_s: float = 600.0


class ToolPlace:
    """One open session."""

    def __init__(self, client: str, now_s: float, changed: Callable[[], None], clock: Callable[[], float]) -> None:
        self.client = client
        self.opened_s = now_s
        self.idle_since_s: float | None = now_s  # None while a call runs
        self.is_told = False  # to end
        self._tell: Callable[[], None] = lambda: None
        self._changed = changed
        self._clock = clock

    def tell(self) -> None:
        """Tell the session to end."""
        self.is_told = True
        self._tell()

    @contextmanager
    def idle(self, tell: Callable[[], None]) -> Iterator[None]:
        """While the session waits for its client. `tell` is called when it must end, at once if it was told before."""
        self._tell = tell
        if self.is_told:
            tell()
        try:
            yield
        finally:
            self._tell = lambda: None

    @contextmanager
    def call(self) -> Iterator[None]:
        """While a call of the session runs."""
        self.idle_since_s = None
        try:
            yield
        finally:
            self.idle_since_s = self._clock()
            self._changed()


class ToolPlaces:
    """Hands out places. `report_load(waiting, open)` is called at every change."""

    def __init__(
        self,
        num_places: int,
        max_waiting: int,
        report_load: Callable[[int, int], None],
        sharing: Sharing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_places = num_places
        self._max_waiting = max_waiting
        self._report_load = report_load
        self._sharing = sharing or Sharing()
        self._clock = clock
        self._open: list[ToolPlace] = []
        self._waiting: dict[str, deque[asyncio.Future[ToolPlace]]] = {}  # by client, in the order in which they came
        self._last_told_s: dict[str, float] = {}  # by the client that it was for; of the last `safe_s` seconds
        self._timer: asyncio.TimerHandle | None = None
        report_load(0, 0)

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[ToolPlace]:
        """A place for a session of `client`. Waits for one. Raises QueueFull, at once or while it waits."""
        place = await self._acquire(client)
        try:
            yield place
        finally:
            self._free(place)

    @property
    def num_waiting(self) -> int:
        """Sessions that wait for a place."""
        return sum(map(len, self._waiting.values()))

    async def _acquire(self, client: str) -> ToolPlace:
        if self.num_waiting >= self._max_waiting:
            self._make_room(client)
        waiter: asyncio.Future[ToolPlace] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiter)
        self._serve()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._free(waiter.result())  # it came just before the cancellation
            else:
                self._leave(client, waiter)
            raise

    def _make_room(self, client: str) -> None:
        """Refuse the newest session of the client with the most waiting ones, or raise QueueFull for `client`."""
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]))
        if len(self._waiting[longest]) <= len(self._waiting.get(client, ())) + 1:
            raise QueueFull(_RETRY_AFTER_S)
        waiter = self._waiting[longest][-1]
        self._leave(longest, waiter)
        if not waiter.done():
            waiter.set_exception(QueueFull(_RETRY_AFTER_S))

    def _leave(self, client: str, waiter: asyncio.Future[ToolPlace]) -> None:
        queue = self._waiting.get(client)
        if queue is None or waiter not in queue:
            return
        queue.remove(waiter)
        if not queue:
            del self._waiting[client]
        self._report_load(self.num_waiting, len(self._open))

    def _free(self, place: ToolPlace) -> None:
        self._open.remove(place)
        self._serve()

    def _serve(self) -> None:
        """Give free places to those that wait, then look for sessions that must end for the rest."""
        held = Counter(place.client for place in self._open)
        while self._waiting and len(self._open) < self._num_places:
            client = min(self._waiting, key=lambda name: held[name])
            waiter = self._waiting[client].popleft()
            queue = self._waiting.pop(client)
            if queue:
                self._waiting[client] = queue  # to the end of the round
            if not waiter.done():
                place = ToolPlace(client, self._clock(), self.look, self._clock)
                self._open.append(place)
                held[client] += 1
                waiter.set_result(place)
        self._report_load(self.num_waiting, len(self._open))
        self.look()

    def look(self) -> None:
        """Tell sessions to end, if clients wait that have fewer. Called at each change, and each second meanwhile."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        now_s = self._clock()
        self._last_told_s = {
            client: told_s for client, told_s in self._last_told_s.items() if now_s - told_s < self._sharing.safe_s
        }
        held, wanted = self._expected()
        while wanted and (client := min(wanted, key=lambda name: held[name])):
            found = None if client in self._last_told_s else self._found(client, held, now_s)
            if found is None:
                del wanted[client]
                continue
            found.tell()
            self._last_told_s[client] = now_s
            held[found.client] -= 1
            _take(client, held, wanted)
        self._timer = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self.look)

    def _expected(self) -> tuple[Counter[str], Counter[str]]:
        """Sessions by client once those that were told have ended, and the waiting ones that then have no place."""
        held = Counter(place.client for place in self._open if not place.is_told)
        wanted = Counter({client: len(queue) for client, queue in self._waiting.items()})
        for _ in range(self._num_places - held.total()):
            if not wanted:
                break
            _take(min(wanted, key=lambda name: held[name]), held, wanted)
        return held, wanted

    def _found(self, client: str, held: Counter[str], now_s: float) -> ToolPlace | None:
        """The session that must end for `client`: the longest idle one of the client with the most sessions."""
        own, sharing = held[client], self._sharing

        def idle_s(place: ToolPlace) -> float:
            return -math.inf if place.idle_since_s is None else now_s - place.idle_since_s

        def may_end(place: ToolPlace) -> bool:
            others, open_s = held[place.client], now_s - place.opened_s
            if place.is_told or place.idle_since_s is None or others <= own:
                return False
            is_over_share = others >= own + 2 and open_s >= sharing.safe_s
            is_left = idle_s(place) >= sharing.long_idle_s
            return is_over_share or is_left or (not own and open_s >= sharing.long_open_s)

        candidates = filter(may_end, self._open)
        return max(candidates, key=lambda place: (held[place.client], idle_s(place)), default=None)


def _take(client: str, held: Counter[str], wanted: Counter[str]) -> None:
    """Count one of the wanted sessions of `client` as held."""
    held[client] += 1
    wanted[client] -= 1
    if not wanted[client]:
        del wanted[client]
