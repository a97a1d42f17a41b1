"""A readers-writer lock for runs: many share the machine, and a run that needs exact timing has it exclusively.

INVARIANT: during an exclusive run no other run is in progress. After an exclusive run of t seconds, shared runs have
the machine for at least REST * t seconds before the next exclusive run, unless there are no shared runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

REST = 4.0


class ExclusiveRunTimeout(Exception):
    """The machine did not become free of other runs within the time allowed."""


class ExclusiveRunLock:
    """One instance for all runs of a machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_shared = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()
        self._rest_until_s = 0.0

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the machine together with other shared runs."""
        while not self._open.is_set():
            await self._open.wait()  # bounded: the exclusive run has its own time limit
        self._num_shared += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_shared -= 1
            if not self._num_shared:
                self._idle.set()

    @asynccontextmanager
    async def exclusive(self, patience_s: float) -> AsyncIterator[None]:
        """Hold the machine alone. Raises ExclusiveRunTimeout if it does not become free in `patience_s` seconds."""
        try:
            async with asyncio.timeout(patience_s):
                await self._turn.acquire()
        except TimeoutError:
            raise ExclusiveRunTimeout from None
        try:
            await self._wait_until_idle(patience_s)
            begun_s = self._clock()
            try:
                yield
            finally:
                now_s = self._clock()
                self._rest_until_s = now_s + REST * (now_s - begun_s)
        finally:
            self._open.set()
            self._turn.release()

    async def _wait_until_idle(self, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await self._wait_for_rest()
                self._open.clear()
                await self._idle.wait()
        except TimeoutError:
            raise ExclusiveRunTimeout from None

    async def _wait_for_rest(self) -> None:
        left_s = self._rest_until_s - self._clock()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._idle.wait()
