"""A readers-writer lock for runs: many share the machine, and a run that needs exact timing has it exclusively.

INVARIANT: during the first ALONE_S seconds of an exclusive run no other run is in progress; later ones may begin. No
run waits longer than DRAIN_S seconds for others to end, and ALONE_S seconds for the exclusive run. After runs had to
wait for t seconds, shared runs have the machine for at least REST * t seconds, unless there are none. With neighbours
(other processes that grade on this machine) all this holds for their runs too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from nouscoder.verifier.grading.neighbours import Neighbours, NoNeighbours

REST = 4.0
ALONE_S = 5.0  # a program that sleeps makes the other runs wait no longer than this
_POLL_S = 0.01  # neighbours cannot wake this process
DRAIN_S = 15.0  # nor longer than this until a long run, which keeps the exclusive one waiting, has ended


class ExclusiveRunTimeout(Exception):
    """The machine did not become free of other runs within the time allowed."""


@dataclass(slots=True, eq=False)
class SharedRun:
    """A run that holds the machine together with others. `had_others`: another run was in progress meanwhile."""

    had_others: bool = False


class ExclusiveRunLock:
    """One instance for all runs of a process. `neighbours` are the other processes that grade on this machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, neighbours: Neighbours | None = None) -> None:
        self._clock = clock
        self._neighbours = neighbours or NoNeighbours()
        self._shared: set[SharedRun] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[SharedRun]:
        """Hold the machine together with other shared runs."""
        mark = await self._entered()
        run = SharedRun()
        self._shared.add(run)
        if len(self._shared) > 1:
            for one in self._shared:
                one.had_others = True
        self._idle.clear()
        try:
            yield run
        finally:
            self._shared.remove(run)
            if self._neighbours.left(mark):
                run.had_others = True
            if not self._shared:
                self._idle.set()

    async def _entered(self) -> object:
        """Wait until shared runs may begin. Bounded: an exclusive run has its own time limit."""
        while True:
            while not self._open.is_set():
                await self._open.wait()
            mark = self._neighbours.entered()
            if not self._neighbours.is_closed:  # read after it was told, so that one of the two sees the other
                return mark
            self._neighbours.left(mark)
            await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def exclusive(self, patience_s: float) -> AsyncIterator[None]:
        """Hold the machine, the first ALONE_S seconds alone.

        Raises ExclusiveRunTimeout if the machine does not become free in `patience_s` seconds.
        """
        try:
            async with asyncio.timeout(patience_s):
                await self._turn.acquire()
        except TimeoutError:
            raise ExclusiveRunTimeout from None
        try:
            async with self._turn_among_neighbours(patience_s), self._alone(patience_s):
                yield
        finally:
            self._turn.release()

    @asynccontextmanager
    async def _turn_among_neighbours(self, patience_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(patience_s):
                while not self._neighbours.try_turn():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ExclusiveRunTimeout from None
        try:
            yield
        finally:
            self._neighbours.give_turn()

    @asynccontextmanager
    async def _alone(self, patience_s: float) -> AsyncIterator[None]:
        try:
            await self._wait_until_idle(patience_s)
            begun_s = self._clock()
            self._neighbours.close(ALONE_S)
            reopening = asyncio.get_running_loop().call_later(ALONE_S, self._open.set)
            try:
                yield
            finally:
                reopening.cancel()
                now_s = self._clock()
                self._neighbours.rest_until_s = now_s + REST * min(now_s - begun_s, ALONE_S)
        finally:
            self._open.set()
            self._neighbours.open()

    async def _wait_until_idle(self, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                while not await self._drained():
                    pass
        except TimeoutError:
            raise ExclusiveRunTimeout from None

    async def _drained(self) -> bool:
        """Begin no other run until those in progress have ended; False when that takes longer than DRAIN_S seconds."""
        await self._wait_for_rest()
        self._open.clear()
        self._neighbours.close(DRAIN_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._idle.wait()
                while self._neighbours.num_running:
                    await asyncio.sleep(_POLL_S)
            return True
        self._open.set()
        self._neighbours.open()
        self._neighbours.rest_until_s = self._clock() + REST * DRAIN_S
        return False

    async def _wait_for_rest(self) -> None:
        left_s = self._neighbours.rest_until_s - self._clock()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._idle.wait()
                    while self._neighbours.num_running:
                        await asyncio.sleep(_POLL_S)
