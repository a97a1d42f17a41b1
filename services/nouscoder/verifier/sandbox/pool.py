"""The runners of a gateway: kept at a number, proven before use, replaced when worn, lost or wrong.

INVARIANT: a runner is lent to one slot at a time, and only after it has passed a canary since it was last lent.

    STARTING -> (answers) UNPROVEN -> (canary passes) READY -> LENT -> (given back in doubt) UNPROVEN
    any -> (worn, stuck, or gone) removed, another is made; UNPROVEN -> (canary fails) QUARANTINED, another is made
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from nouscoder.verifier.sandbox.base import SandboxError
from nouscoder.verifier.sandbox.link import Ending
from nouscoder.verifier.sandbox.runner_link import RunnerBusy

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_STUCK_AFTER_S = 240.0  # images may have to be pulled
_MAX_SILENT_PROOFS = 3


class RunnerState(StrEnum):
    """See the module."""

    STARTING = "starting"
    UNPROVEN = "unproven"
    READY = "ready"
    LENT = "lent"
    QUARANTINED = "quarantined"


class Replaced(StrEnum):
    """Why another runner takes a runner's place."""

    WORN = "worn"
    LOST = "lost"
    STUCK = "stuck"
    CANARY = "canary"
    SILENT = "silent"


class RunnersUnreachable(SandboxError):
    """Who keeps the runners (the Kubernetes API, DNS) does not answer; the message says who and why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A runner as its source sees it; `address` is None while it is starting."""

    name: str
    address: tuple[str, int] | None


class Source(Protocol):
    """Where runners come from. All calls are bounded in time and raise RunnersUnreachable."""

    async def list(self) -> Sequence[Found]:
        """Those that are there, without the quarantined."""
        ...

    async def create(self) -> str | None:
        """Have another one made; its name, or None where runners are kept by somebody else."""
        ...

    async def remove(self, runner: Found) -> None:
        """End it."""
        ...

    async def quarantine(self, runner: Found) -> None:
        """Keep it for inspection, out of use."""
        ...

    async def close(self) -> None:
        """End those that were made here."""
        ...


@dataclass(slots=True)
class Runner:
    """One runner, as the pool sees it."""

    name: str
    address: tuple[str, int] | None
    state: RunnerState
    since_s: float
    silent_proofs: int = 0

    @property
    def found(self) -> Found:
        """For the source."""
        return Found(self.name, self.address)


@dataclass
class RunnerPool:
    """`size` runners to lend, and `spares` more. `prove` runs the canary: False when a runner answers wrongly, and it
    raises SandboxError or OSError when it does not answer.
    """

    source: Source
    prove: Callable[[Runner], Awaitable[bool]]
    size: int
    spares: int = 0
    replaced: Counter[Replaced] = field(default_factory=Counter)
    _runners: dict[str, Runner] = field(default_factory=dict)
    _waiting: deque[asyncio.Future[Runner]] = field(default_factory=deque)
    _proofs: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _keeper: asyncio.Task[None] | None = None
    trouble: str = "no runner has been seen yet"

    @property
    def states(self) -> Mapping[RunnerState, int]:
        """How many runners are in each state."""
        counted = Counter(runner.state for runner in self._runners.values())
        return {state: counted[state] for state in RunnerState}

    @property
    def names(self) -> Sequence[str]:
        """Of the runners that are there, for people and tests."""
        return tuple(self._runners)

    async def start(self) -> None:
        """Begin to keep the pool."""
        self._keeper = asyncio.create_task(self._keep(), name="runner pool")

    async def lend(self, limit_s: float) -> Runner:
        """A proven runner, for whoever asked first. Raises SandboxError after `limit_s`, saying what is in the way."""
        for runner in self._runners.values():
            if runner.state is RunnerState.READY and not self._waiting:
                return self._lent(runner)
        waiter: asyncio.Future[Runner] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        lent: Runner | None = None
        try:
            async with asyncio.timeout(limit_s):
                lent = await waiter
            return lent
        except TimeoutError:
            raise SandboxError(f"no runner was free within {limit_s:.0f} s: {self.trouble}") from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif lent is None and not waiter.cancelled() and waiter.exception() is None:
                self._offer(waiter.result())  # it came in the moment in which we gave up

    async def give_back(self, runner: Runner, ending: Ending) -> None:
        """A worn runner is replaced; one in doubt has to pass the canary again."""
        if self._runners.get(runner.name) is not runner:
            return  # lost meanwhile
        if ending is Ending.WORN:
            await self._replace(runner, Replaced.WORN)
        else:
            self._enter(runner, RunnerState.UNPROVEN)
        self._changed.set()

    async def close(self) -> None:
        """End the runners that were made for this pool."""
        tasks = [task for task in (self._keeper, *self._proofs.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(SandboxError("the sandbox was closed"))
        with contextlib.suppress(RunnersUnreachable):
            await self.source.close()

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            try:
                self._merge(await self.source.list())
                await self._fill_up()
            except RunnersUnreachable as error:
                self.trouble = str(error)
                log.warning("the runner pool cannot be kept", extra={"detail": str(error)})
            for runner in list(self._runners.values()):
                if runner.state is RunnerState.UNPROVEN and runner.name not in self._proofs:
                    task = asyncio.create_task(self._prove(runner), name=f"canary of {runner.name}")
                    self._proofs[runner.name] = task
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._changed.wait()

    def _merge(self, found: Sequence[Found]) -> None:
        now = asyncio.get_running_loop().time()
        seen = {one.name: one for one in found}
        for runner in [r for r in self._runners.values() if r.name not in seen]:
            fresh = runner.state is RunnerState.STARTING and now - runner.since_s < 2 * _LOOK_EVERY_S
            if not fresh and runner.state is not RunnerState.QUARANTINED:  # the list may not show it yet
                self._forget(runner, Replaced.LOST)
        for one in found:
            runner = self._runners.setdefault(one.name, Runner(one.name, None, RunnerState.STARTING, now))
            if runner.state is RunnerState.STARTING and one.address is not None:
                runner.address = one.address
                self._enter(runner, RunnerState.UNPROVEN)

    async def _fill_up(self) -> None:
        now = asyncio.get_running_loop().time()
        for runner in list(self._runners.values()):
            if runner.state is RunnerState.STARTING and now - runner.since_s > _STUCK_AFTER_S:
                self.trouble = f"runner {runner.name} did not start within {_STUCK_AFTER_S:.0f} s"
                await self._replace(runner, Replaced.STUCK)
        kept = [r for r in self._runners.values() if r.state is not RunnerState.QUARANTINED]
        for _ in range(self.size + self.spares - len(kept)):
            name = await self.source.create()
            if name is None:
                return
            self._runners[name] = Runner(name, None, RunnerState.STARTING, now)

    async def _prove(self, runner: Runner) -> None:
        try:
            if await self.prove(runner):
                runner.silent_proofs = 0
                self._offer(runner)
                return
            log.error("a runner failed its canary and is quarantined", extra={"runner": runner.name})
            self.replaced[Replaced.CANARY] += 1
            self._enter(runner, RunnerState.QUARANTINED)
            await self.source.quarantine(runner.found)
        except RunnerBusy as error:  # another gateway's
            self.trouble = str(error)
            await asyncio.sleep(_LOOK_EVERY_S)
        except RunnersUnreachable as error:
            self.trouble = str(error)
        except (SandboxError, OSError) as error:
            self.trouble = f"runner {runner.name} does not answer: {error}"
            runner.silent_proofs += 1
            if runner.silent_proofs >= _MAX_SILENT_PROOFS:
                with contextlib.suppress(RunnersUnreachable):
                    await self._replace(runner, Replaced.SILENT)
        finally:
            self._proofs.pop(runner.name, None)
            self._changed.set()

    def _offer(self, runner: Runner) -> None:
        """It is ready: for the first who waits, if anybody does."""
        if self._runners.get(runner.name) is not runner:
            return
        self._enter(runner, RunnerState.READY)
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(self._lent(runner))
                return

    def _lent(self, runner: Runner) -> Runner:
        self._enter(runner, RunnerState.LENT)
        return runner

    async def _replace(self, runner: Runner, why: Replaced) -> None:
        self._forget(runner, why)
        await self.source.remove(runner.found)

    def _forget(self, runner: Runner, why: Replaced) -> None:
        log.info("a runner is replaced", extra={"runner": runner.name, "why": why.value})
        self.replaced[why] += 1
        self._runners.pop(runner.name, None)

    def _enter(self, runner: Runner, state: RunnerState) -> None:
        runner.state = state
        runner.since_s = asyncio.get_running_loop().time()
