"""A readers-writer lock for runs: many share the machine, and a run that needs exact timing has it exclusively.

INVARIANT: during the first ALONE_S seconds of an exclusive run no other run is in progress; later ones may begin. No
run waits longer than DRAIN_S seconds for others to end, and ALONE_S seconds for the exclusive run. After runs had to
wait for t seconds, shared runs have the machine for at least REST * t seconds, unless there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

REST = 4.0
ALONE_S = 5.0  # a program that sleeps makes the other runs wait no longer than this
DRAIN_S = 15.0  # nor longer than this until a long run, which keeps the exclusive one waiting, has ended


class ExclusiveRunTimeout(Exception):
    """The machine did not become free of other runs within the time allowed."""


@dataclass(slots=True, eq=False)
class SharedRun:
    """A run that holds the machine together with others. `had_others`: another run was in progress meanwhile."""

    had_others: bool = False


class ExclusiveRunLock:
    """One instance for all runs of a machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shared: set[SharedRun] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()
        self._rest_until_s = 0.0

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[SharedRun]:
        """Hold the machine together with other shared runs."""
        while not self._open.is_set():
            await self._open.wait()  # bounded: the exclusive run has its own time limit
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
            if not self._shared:
                self._idle.set()

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
            await self._wait_until_idle(patience_s)
            begun_s = self._clock()
            reopening = asyncio.get_running_loop().call_later(ALONE_S, self._open.set)
            try:
                yield
            finally:
                reopening.cancel()
                now_s = self._clock()
                self._rest_until_s = now_s + REST * min(now_s - begun_s, ALONE_S)
        finally:
            self._open.set()
            self._turn.release()

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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._idle.wait()
            return True
        self._open.set()
        self._rest_until_s = self._clock() + REST * DRAIN_S
        return False

    async def _wait_for_rest(self) -> None:
        left_s = self._rest_until_s - self._clock()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._idle.wait()
