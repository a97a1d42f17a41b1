"""Time limits that do not depend on the load of the machine.

The wall time of a run omits the time in which others kept it from the CPU, where the kernel tells it (not in gVisor).
The sandbox enforces 15 % more than the limit, and the measured time decides. A run that ends within the limit keeps it.
A run that reaches the extended limit breaks it. Two kinds of runs are repeated with the machine to themselves, and the
second measurement counts: a run that ends between the limit and the extended limit, and a run that reached a limit with
little CPU time while other runs were in progress, because they may have taken the CPU. In gVisor, whose CPU clocks go
on while the host runs something else, the harness counts the CPU time of a run that reached a limit by the share of a
CPU that it could have (init/program.c). The repetitions of a submission are bounded (`Repetitions`).

INVARIANT: during the first ALONE_S seconds of an exclusive run no other run is in progress; later ones may begin. No
run waits longer than DRAIN_S seconds for others to end, and ALONE_S seconds for the exclusive run. After runs had to
wait for t seconds, shared runs have the machine for at least REST * t seconds, unless there are none. With other
processes that grade on this machine all this holds for their runs too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox.base import Exit, RunResult

REST = 4.0
ALONE_S = 5.0  # a program that sleeps makes the other runs wait no longer than this
_POLL_S = 0.01  # other processes cannot wake this one
DRAIN_S = 15.0  # nor longer than this until a long run, which keeps the exclusive one waiting, has ended
Ruled = TypeVar("Ruled")
log = logging.getLogger(__name__)
BORDERLINE = 0.15
EXCLUSIVE_PATIENCE_S = 60.0
LITTLE_CPU = 0.5  # a run that used a smaller share of its wall time waited: for the CPU, or for nothing
MAX_REPETITIONS_S = 60.0


class ExclusiveRunTimeout(Exception):
    """The machine did not become free of other runs within the time allowed."""


@dataclass(slots=True, eq=False)
class SharedRun:
    """A run that holds the machine together with others. `had_others`: another run was in progress meanwhile."""

    had_others: bool = False


class ExclusiveRunLock:
    """One instance for all runs of a process: many share the machine, and one that needs exact timing has it alone.

    `others` are the other processes that grade on this machine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, others: OtherProcesses | None = None) -> None:
        self._clock = clock
        self._others = others or OtherProcesses()
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
            if self._others.left(mark):
                run.had_others = True
            if not self._shared:
                self._idle.set()

    async def _entered(self) -> object:
        """Wait until shared runs may begin. Bounded: an exclusive run has its own time limit."""
        while True:
            while not self._open.is_set():
                await self._open.wait()
            mark = self._others.entered()
            if not self._others.is_closed:  # read after it was told, so that one of the two sees the other
                return mark
            self._others.left(mark)
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
            async with self._turn_among_all(patience_s), self._alone(patience_s):
                yield
        finally:
            self._turn.release()

    @asynccontextmanager
    async def _turn_among_all(self, patience_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(patience_s):
                while not self._others.try_turn():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ExclusiveRunTimeout from None
        try:
            yield
        finally:
            self._others.give_turn()

    @asynccontextmanager
    async def _alone(self, patience_s: float) -> AsyncIterator[None]:
        try:
            try:
                async with asyncio.timeout(patience_s):
                    while not await self._drained():
                        pass
            except TimeoutError:
                raise ExclusiveRunTimeout from None
            begun_s = self._clock()
            self._others.close(ALONE_S)
            reopening = asyncio.get_running_loop().call_later(ALONE_S, self._open.set)
            try:
                yield
            finally:
                reopening.cancel()
                now_s = self._clock()
                self._others.rest_until_s = now_s + REST * min(now_s - begun_s, ALONE_S)
        finally:
            self._open.set()
            self._others.open()

    async def _drained(self) -> bool:
        """Begin no other run until those in progress have ended; False when that takes longer than DRAIN_S seconds."""
        left_s = self._others.rest_until_s - self._clock()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._idle.wait()
                    while self._others.num_running:
                        await asyncio.sleep(_POLL_S)
        self._open.clear()
        self._others.close(DRAIN_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._idle.wait()
                while self._others.num_running:
                    await asyncio.sleep(_POLL_S)
            return True
        self._open.set()
        self._others.open()
        self._others.rest_until_s = self._clock() + REST * DRAIN_S
        return False


@dataclass(slots=True)
class Repetitions:
    """The seconds that the repetitions of one submission have taken, with their waits.

    None begins after MAX_REPETITIONS_S seconds. Otherwise a program that sleeps in every test would be graded too long.
    """

    spent_s: float = 0.0

    @property
    def are_over(self) -> bool:
        """Whether no further repetition may begin."""
        return self.spent_s >= MAX_REPETITIONS_S


def max_repetitions_s(limits: Limits) -> float:
    """The longest time that all repetitions of a submission can take together [s]: the last may begin just in time."""
    return MAX_REPETITIONS_S + 2 * EXCLUSIVE_PATIENCE_S + extended_limits(limits).wall_time_s


@functools.lru_cache(maxsize=256)  # asked several times a run
def extended_limits(limits: Limits) -> Limits:
    """The limits that the sandbox enforces: the submission's own plus the borderline share."""
    more = 1 + BORDERLINE
    return replace(limits, wall_time_s=limits.wall_time_s * more, cpu_time_s=limits.cpu_time_s * more)


async def run_with_time_limits(
    run: Callable[[], Awaitable[tuple[RunResult, Ruled | None]]],
    limits: Limits,
    run_lock: ExclusiveRunLock,
    repetitions: Repetitions,
) -> tuple[RunResult, Ruled | None]:
    """The result that counts and its ruling. The ruling is None when the result breaks a time limit.

    `run` must enforce `extended_limits(limits)`. It is awaited once, or twice for a result that may be due to other
    runs. Exceptions of `run` propagate.
    """
    async with run_lock.shared() as shared:
        result, ruling = await run()
    doubtful = _is_late(result, limits) or (shared.had_others and _had_little_cpu(result, limits))
    if doubtful and not repetitions.are_over:
        try:
            async with repetition(run_lock, repetitions):
                result, ruling = await run()
        except ExclusiveRunTimeout:
            log.warning("a doubtful timeout counts: the machine did not become free for an exclusive run")
    return (replace(result, exit=Exit.TIME_LIMIT), None) if _is_late(result, limits) else (result, ruling)


@asynccontextmanager
async def repetition(run_lock: ExclusiveRunLock, repetitions: Repetitions) -> AsyncIterator[None]:
    """Hold the machine alone. Its time and the wait for it count. Raises ExclusiveRunTimeout."""
    begun_s = time.monotonic()
    try:
        async with run_lock.exclusive(EXCLUSIVE_PATIENCE_S):
            yield
    finally:
        repetitions.spent_s += time.monotonic() - begun_s


def _is_late(result: RunResult, limits: Limits) -> bool:
    """Whether the process ended by itself but over the limit."""
    ended = result.exit in (Exit.EXITED, Exit.SIGNALLED)
    return ended and (result.wall_time_s > limits.wall_time_s or result.cpu_time_s > limits.cpu_time_s)


def _had_little_cpu(result: RunResult, limits: Limits) -> bool:
    """Whether the process was killed for a time limit after it had used little CPU time.

    Below its wall time limit it was killed for its CPU limit. Less than that is little: gVisor's clock counted more.
    """
    by_wall = result.wall_time_s >= limits.wall_time_s
    enough_s = min(LITTLE_CPU * limits.wall_time_s, limits.cpu_time_s) if by_wall else limits.cpu_time_s
    return result.exit is Exit.TIME_LIMIT and result.cpu_time_s < enough_s


class OtherProcesses:
    """The runs of other processes on this machine, as far as an exclusive run must know them. Here there are none."""

    rest_until_s = 0.0  # shared runs have the machine until then, by the clock of the lock

    @property
    def num_running(self) -> int:
        """Shared runs of other processes in progress."""
        return 0

    @property
    def is_closed(self) -> bool:
        """Whether another process waits for its exclusive run, or begins it, so that no shared run may begin."""
        return False

    def entered(self) -> object:
        """Tell the others that a shared run of this process begins. Returns what `left` needs."""
        return None

    def left(self, mark: object) -> bool:
        """Tell the others that the run has ended. Returns whether another process had a run meanwhile."""
        return False

    def close(self, seconds: float) -> None:
        """Let no other process begin a shared run for so long, or until `open`."""

    def open(self) -> None:
        """Let others begin shared runs."""

    def try_turn(self) -> bool:
        """Take the right to an exclusive run, if no other process has it."""
        return True

    def give_turn(self) -> None:
        """Give that right back."""
