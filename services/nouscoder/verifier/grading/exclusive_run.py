"""Runs beside each other, and now and then one alone on the machine.

INVARIANT: while a run is alone no other run is in progress; after one that took t seconds, others have the machine for
at least REST * t seconds before the next is alone, unless there are no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

REST = 4.0


class NeverAlone(Exception):
    """The machine was never free of other runs in the time given."""


class Crowd:
    """One for all runs of a machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._together = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()
        self._rest_until_s = 0.0

    @asynccontextmanager
    async def among_others(self) -> AsyncIterator[None]:
        """For a run like most."""
        while not self._open.is_set():
            await self._open.wait()  # ends with the one run that is alone, which has its own limit
        self._together += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._together -= 1
            if not self._together:
                self._quiet.set()

    @asynccontextmanager
    async def alone(self, patience_s: float) -> AsyncIterator[None]:
        """For a run that must be the only one. Raises NeverAlone when that cannot be had in `patience_s` seconds."""
        try:
            async with asyncio.timeout(patience_s):
                await self._turn.acquire()
        except TimeoutError:
            raise NeverAlone from None
        try:
            await self._empty_the_machine(patience_s)
            begun_s = self._clock()
            try:
                yield
            finally:
                now_s = self._clock()
                self._rest_until_s = now_s + REST * (now_s - begun_s)
        finally:
            self._open.set()
            self._turn.release()

    async def _empty_the_machine(self, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await self._rested()
                self._open.clear()
                await self._quiet.wait()
        except TimeoutError:
            raise NeverAlone from None

    async def _rested(self) -> None:
        left_s = self._rest_until_s - self._clock()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._quiet.wait()
