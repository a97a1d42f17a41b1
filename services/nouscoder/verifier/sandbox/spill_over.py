"""Several backends as one: the first is preferred, and the next ones take what has waited too long for it.

INVARIANT: each backend has at most as many sessions as it has usable slots. Sessions get their backend in order of age.
One uses backend k only when no earlier backend has a slot for it and it is at least k times `after_s` seconds old.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nouscoder.verifier.sandbox.base import (
    BackendUse,
    Dialogue,
    Program,
    Sandbox,
    SandboxError,
    Session,
)


def place(age_s: float, after_s: float, free: Sequence[int]) -> int | None:
    """The backend for a session of this age, or None if it must wait. `free[k]` is the number of free slots of k."""
    for index, slots in enumerate(free):
        if slots > 0 and age_s >= index * after_s:
            return index
    return None


def next_change_s(age_s: float, after_s: float, free: Sequence[int]) -> float | None:
    """Seconds until a waiting session becomes old enough for a backend with a free slot; None if there is none."""
    waits = [index * after_s - age_s for index, slots in enumerate(free) if slots > 0]
    return max(0.0, min(waits)) if waits else None


@dataclass(slots=True)
class Backend:
    """One backend with its sessions in progress, and what all sessions took so far."""

    sandbox: Sandbox
    in_use: int = 0
    submissions: int = 0
    seconds: float = 0.0

    @property
    def use(self) -> BackendUse:
        """The sums until now."""
        return replace(self.sandbox.use, submissions=self.submissions, seconds=self.seconds)


@dataclass(order=True, slots=True)
class _Waiting:
    """A session without a backend; the oldest is first."""

    since_s: float
    number: int
    backend: asyncio.Future[Backend] = field(compare=False)


class SpillOverSandbox(Sandbox):
    """See `Sandbox` and the module. One backend is enough: it is then only counted."""

    def __init__(
        self, sandboxes: Sequence[Sandbox], after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.backends = [Backend(sandbox) for sandbox in sandboxes]
        self.name = "+".join(sandbox.name for sandbox in sandboxes)
        self.num_slots = sum(sandbox.num_slots for sandbox in sandboxes)
        self._after_s = after_s
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._changed: Callable[[], None] = lambda: None

    @property
    def isolation(self) -> tuple[str, ...]:
        """See `Sandbox`: the layers that every backend has."""
        first, *others = (backend.sandbox.isolation for backend in self.backends)
        return tuple(layer for layer in first if all(layer in layers for layers in others))

    @property
    def runners(self) -> Mapping[str, int]:
        """The runners of all backends, by state."""
        return sum((Counter(dict(backend.sandbox.use.runners)) for backend in self.backends), Counter())

    @property
    def replacements(self) -> Mapping[str, int]:
        """The replaced runners of all backends, by reason."""
        return sum((Counter(dict(backend.sandbox.use.replacements)) for backend in self.backends), Counter())

    @property
    def uses(self) -> Mapping[str, BackendUse]:
        """What each backend has done, by its name."""
        return {backend.sandbox.name: backend.use for backend in self.backends}

    @property
    def usable_slots(self) -> int:
        return sum(backend.sandbox.usable_slots for backend in self.backends)

    def watch_slots(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def demand(self, submissions: int) -> None:
        """See `Sandbox`. Only the first backend grows with it: the others have what spills over."""
        self.backends[0].sandbox.demand(submissions)

    async def start(self) -> None:
        """See `Sandbox`. Every backend must start."""
        for backend in self.backends:
            backend.sandbox.watch_slots(self._slots_changed)
        try:
            async with asyncio.TaskGroup() as group:
                for backend in self.backends:
                    group.create_task(backend.sandbox.start())
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.backend.done():
                waiting.backend.set_exception(SandboxError("the sandbox was closed"))
        await asyncio.gather(*(backend.sandbox.close() for backend in self.backends))

    @contextlib.asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[Session]:
        async with self._placed(program) as sandbox, sandbox.session(program) as session:
            yield session

    @contextlib.asynccontextmanager
    async def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AsyncIterator[tuple[Session, ...]]:
        async with self._placed(program) as sandbox, sandbox.with_partners(program, partner, checker) as sessions:
            yield sessions

    @contextlib.asynccontextmanager
    async def dialogue(self, program: Program) -> AsyncIterator[Dialogue]:
        async with self._placed(program) as sandbox, sandbox.dialogue(program) as dialogue:
            yield dialogue

    @contextlib.asynccontextmanager
    async def _placed(self, program: Program) -> AsyncIterator[Sandbox]:
        since_s = program.since_s if program.since_s is not None else self._clock()
        backend = await self._backend_for(since_s)
        begun_s = self._clock()
        try:
            yield backend.sandbox
        finally:
            backend.in_use -= 1
            backend.submissions += 1
            backend.seconds += self._clock() - begun_s
            self._dispatch()

    async def _backend_for(self, since_s: float) -> Backend:
        if not self._waiting and (index := self._place(since_s)) is not None:
            self.backends[index].in_use += 1
            return self.backends[index]
        waiting = _Waiting(since_s, next(self._numbers), asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiting)
        self._dispatch()
        try:
            return await waiting.backend
        except asyncio.CancelledError:
            if waiting.backend.done() and not waiting.backend.cancelled() and waiting.backend.exception() is None:
                waiting.backend.result().in_use -= 1  # it was assigned just before the cancellation
            self._dispatch()
            raise

    @property
    def _free(self) -> list[int]:
        return [backend.sandbox.usable_slots - backend.in_use for backend in self.backends]

    def _place(self, since_s: float) -> int | None:
        return place(self._clock() - since_s, self._after_s, self._free)

    def _slots_changed(self) -> None:
        self._dispatch()
        self._changed()

    def _dispatch(self) -> None:
        """Give backends to the oldest sessions. Called whenever a slot may have become free, and by the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            oldest = self._waiting[0]
            if oldest.backend.done():  # cancelled
                heapq.heappop(self._waiting)
                continue
            index = self._place(oldest.since_s)
            if index is None:
                pause_s = next_change_s(self._clock() - oldest.since_s, self._after_s, self._free)
                if pause_s is not None:
                    self._timer = asyncio.get_running_loop().call_later(pause_s, self._dispatch)
                return
            heapq.heappop(self._waiting)
            self.backends[index].in_use += 1
            oldest.backend.set_result(self.backends[index])
