"""The pool of a gateway's runners: as many as wanted, tested before use, replaced when worn, lost or wrong.

INVARIANT: a runner is lent to one slot at a time, and only after it has passed a canary since it was last lent.

    STARTING -> (is reachable) UNPROVEN -> (canary passes) READY -> LENT -> (returned in doubt) UNPROVEN
    READY -> (idle for long) UNPROVEN; any -> (worn, stuck or lost) removed and replaced
    any but LENT -> (more than wanted) removed
    UNPROVEN -> (its kernel is not gVisor's) waits, removed and replaced
    UNPROVEN -> (canary fails) QUARANTINED and replaced
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from nouscoder.verifier.sandbox.base import SandboxError
from nouscoder.verifier.sandbox.runners.link import KernelUnproven, RunnerBusy

log = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 1.0
_PAUSE_S = 0.02  # between two looks: one looks at every runner, and a thousand change often
_MADE_A_LOOK = 20  # so that the first are lent while others are still to be made
_STUCK_AFTER_S = 240.0  # long enough to pull images
_RECHECK_AFTER_S = 120.0  # below the time after which an idle runner ends itself (`runner/agent.py`)
_MAX_SILENT_PROOFS = 3
_WRONG_KERNEL_PAUSE_S = 30.0  # before another runner is made, which probably has the same kernel


class RunnersUnreachable(SandboxError):
    """The source of the runners (the Kubernetes API, DNS or Modal) does not answer. The message says which and why."""


class RunnersLimited(RunnersUnreachable):
    """The source makes no further runner for now, because of a limit. The message names the limit."""


@dataclass(frozen=True, slots=True)
class FoundRunner:
    """A runner as its source reports it. `address` is None while the runner starts.

    After `use_until_s` (by time.monotonic) it takes no new submission, because it will end. `waits_for` is why it has
    no address yet, if the source knows.
    """

    name: str
    address: tuple[str, int] | None
    use_until_s: float = math.inf
    waits_for: str = ""


class Source(Protocol):
    """Where runners come from: the Kubernetes API, DNS or Modal.

    All calls are bounded in time and raise RunnersUnreachable.
    """

    async def start(self, on_change: Callable[[], None]) -> None:
        """Begin to find runners. `on_change` may be called when the list has changed."""
        ...

    async def list(self) -> Sequence[FoundRunner]:
        """The existing runners without the quarantined ones."""
        ...

    async def create(self) -> str | None:
        """Make another runner. Returns its name, or None if the source does not make runners.

        Raises RunnersLimited when a limit forbids it for now.
        """
        return None

    async def remove(self, runner: FoundRunner) -> None:
        """End a runner."""
        ...

    async def quarantine(self, runner: FoundRunner) -> None:
        """Take a runner out of use, but keep it for inspection."""
        ...

    async def lacked_memory(self, runner: FoundRunner) -> bool:
        """Whether a runner was killed because it reached its memory limit. False where the source cannot tell.

        Waits some seconds for the news, because a connection may end earlier.
        """
        return False

    async def close(self) -> None:
        """End the runners that this source has made."""
        ...


class RunnerState(StrEnum):
    """The state of a runner; pool.py shows the transitions."""

    STARTING = "starting"
    UNPROVEN = "unproven"
    READY = "ready"
    LENT = "lent"
    QUARANTINED = "quarantined"


class Replaced(StrEnum):
    """The reason for which a runner was replaced."""

    WORN = "worn"
    LOST = "lost"
    STUCK = "stuck"
    CANARY = "canary"
    SILENT = "silent"
    KERNEL = "kernel"
    KEY = "key"


@dataclass(slots=True)
class Runner:
    """One runner in the pool."""

    name: str
    address: tuple[str, int] | None
    state: RunnerState
    since_s: float
    silent_proofs: int = 0
    use_until_s: float = math.inf
    is_outdated: bool = False  # it is replaced as soon as no slot has it

    @property
    def found(self) -> FoundRunner:
        """The runner in the form that the source takes."""
        return FoundRunner(self.name, self.address)


@dataclass(eq=False)  # a pool is itself: it offers tools until it is closed
class RunnerPool:
    """Keeps `size` runners to lend, and `spares` more.

    `prove` runs the canary. It returns False when a runner answers wrongly, and raises SandboxError or OSError when a
    runner does not answer.
    """

    source: Source
    prove: Callable[[Runner], Awaitable[bool]]
    size: int
    spares: int = 0
    is_sized_by_demand: bool = False  # runners beyond these are ended: never with runners that others may have
    replaced: Counter[Replaced] = field(default_factory=Counter)
    num_starts: int = 0  # runners that became reachable
    start_s: float = 0.0  # from their creation until then, all together
    _runners: dict[str, Runner] = field(default_factory=dict)
    _waiting: deque[asyncio.Future[Runner]] = field(default_factory=deque)
    _proofs: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _keeper: asyncio.Task[None] | None = None
    last_problem: str = "no runner has been found yet"

    @property
    def states(self) -> Mapping[RunnerState, int]:
        """The number of runners in each state."""
        counted = Counter(one.state for one in list(self._runners.values()))  # any thread may ask
        return {state: counted[state] for state in RunnerState}

    @property
    def names(self) -> Sequence[str]:
        """The names of the runners, for logs and tests."""
        return tuple(self._runners)

    async def start(self) -> None:
        """Start to maintain the pool."""
        await self.source.start(self._changed.set)
        self._keeper = asyncio.create_task(self._keep(), name="runner pool")

    async def lend(self, limit_s: float) -> Runner:
        """A proven runner, in order of request. Raises SandboxError with the reason after `limit_s` seconds."""
        ready = (one for one in self._runners.values() if one.state is RunnerState.READY)
        if not self._waiting and (runner := next(ready, None)) is not None:
            return self._lent(runner)
        waiter: asyncio.Future[Runner] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        lent: Runner | None = None
        try:
            async with asyncio.timeout(limit_s):
                lent = await waiter
            return lent
        except TimeoutError:
            raise SandboxError(f"no runner was free within {limit_s:.0f} s: {self.last_problem}") from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif lent is None and not waiter.cancelled() and waiter.exception() is None:
                self._offer(waiter.result())  # a runner was assigned just before the timeout or cancellation

    async def give_back(self, runner: Runner, *, worn: bool) -> None:
        """Take a runner back. A worn one is replaced; one in doubt must pass the canary again."""
        if self._runners.get(runner.name) is not runner or runner.state is RunnerState.QUARANTINED:
            return  # it was lost while it was lent
        if runner.is_outdated or worn:
            await self._replace(runner, Replaced.KEY if runner.is_outdated else Replaced.WORN)
        elif self._surplus > 0:
            await self._dismiss(runner)
        else:
            self._enter(runner, RunnerState.UNPROVEN)
        self._changed.set()

    def resize(self, size: int, spares: int) -> None:
        """Keep so many runners from now on. Those that slots have stay until they are given back."""
        if (size, spares) != (self.size, self.spares):
            self.size, self.spares = size, spares
            self._changed.set()

    @property
    def _surplus(self) -> int:
        """The runners beyond those that are wanted, which may be ended; negative when some are missing."""
        kept = sum(runner.state is not RunnerState.QUARANTINED for runner in self._runners.values())
        surplus = kept - self.size - self.spares
        return surplus if self.is_sized_by_demand else min(0, surplus)

    @property
    def usable(self) -> Sequence[Runner]:
        """The runners that are ready or lent."""
        return [r for r in self._runners.values() if r.state in (RunnerState.READY, RunnerState.LENT)]

    def to_outdate(self, is_outdated: Callable[[str], bool]) -> list[Runner]:
        """The runners to replace now: a tenth of the pool at a time, at least one, those that no slot has first."""
        usable, wanted = self.usable, self.size + self.spares
        going = sum(runner.is_outdated for runner in usable) + wanted - len(usable)
        found = [runner for runner in usable if not runner.is_outdated and is_outdated(runner.name)]
        return sorted(found, key=lambda one: one.state is RunnerState.LENT)[: max(0, max(1, wanted // 10) - going)]

    async def outdate(self, runner: Runner) -> None:
        """Replace a runner as soon as no slot has it. Raises RunnersUnreachable."""
        runner.is_outdated = True
        if runner.state is RunnerState.READY:
            await self._replace(runner, Replaced.KEY)
            self._changed.set()

    async def close(self) -> None:
        """Stop maintaining the pool and end the runners that were made for it."""
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
            except RunnersLimited as error:
                if self.last_problem != str(error):
                    log.info("the runner pool is limited", extra={"detail": str(error)})
                self.last_problem = str(error)
            except RunnersUnreachable as error:
                self.last_problem = str(error)
                log.warning("the runner pool cannot be maintained", extra={"detail": str(error)})
            self._recheck()
            for runner in list(self._runners.values()):
                if runner.state is RunnerState.UNPROVEN and runner.name not in self._proofs:
                    task = asyncio.create_task(self._prove(runner), name=f"canary of {runner.name}")
                    self._proofs[runner.name] = task
            await asyncio.sleep(_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_INTERVAL_S):
                    await self._changed.wait()

    def _merge(self, found: Sequence[FoundRunner]) -> None:
        now = asyncio.get_running_loop().time()
        seen = {one.name: one for one in found}
        for runner in [r for r in self._runners.values() if r.name not in seen]:
            # A runner that was just made may not be in the list yet.
            fresh = runner.state is RunnerState.STARTING and now - runner.since_s < 2 * _CHECK_INTERVAL_S
            if not fresh and runner.state is not RunnerState.QUARANTINED:
                self._forget(runner, Replaced.LOST)
        for one in found:
            runner = self._runners.setdefault(one.name, Runner(one.name, None, RunnerState.STARTING, now))
            if one.waits_for:
                self.last_problem = f"runner {one.name} has not started: {one.waits_for}"
            if runner.state is RunnerState.STARTING and one.address is not None:
                runner.address, runner.use_until_s = one.address, one.use_until_s
                self.num_starts, self.start_s = self.num_starts + 1, self.start_s + now - runner.since_s
                self._enter(runner, RunnerState.UNPROVEN)

    async def _fill_up(self) -> None:
        now = asyncio.get_running_loop().time()
        for runner in list(self._runners.values()):
            if runner.state is RunnerState.STARTING and now - runner.since_s > _STUCK_AFTER_S:
                self.last_problem = f"runner {runner.name} did not start within {_STUCK_AFTER_S:.0f} s"
                await self._replace(runner, Replaced.STUCK)
        for runner in self._dismissible()[: max(0, self._surplus)]:
            await self._dismiss(runner)
        missing = -self._surplus
        for _ in range(min(_MADE_A_LOOK, missing)):
            begun_s = asyncio.get_running_loop().time()
            name = await self.source.create()
            if name is None:
                return
            self._runners[name] = Runner(name, None, RunnerState.STARTING, begun_s)
        if missing > _MADE_A_LOOK:
            self._changed.set()

    def _dismissible(self) -> list[Runner]:
        """The runners that no slot has, the least useful first."""
        order = (RunnerState.STARTING, RunnerState.UNPROVEN, RunnerState.READY)
        return sorted((r for r in self._runners.values() if r.state in order), key=lambda r: order.index(r.state))

    def _recheck(self) -> None:
        """Prove runners again that were idle for long, a few at a time. It also tells them that their gateway lives."""
        now = asyncio.get_running_loop().time()
        ready = [r for r in self._runners.values() if r.state is RunnerState.READY]
        idle = sorted((r for r in ready if now - r.since_s > _RECHECK_AFTER_S), key=lambda r: r.since_s)
        for runner in idle[: max(0, 1 + self.size // 10 - len(self._proofs))]:
            self._enter(runner, RunnerState.UNPROVEN)

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
        except RunnerBusy as error:  # another gateway uses it
            self.last_problem = str(error)
            await asyncio.sleep(_CHECK_INTERVAL_S)
        except KernelUnproven as error:
            self.last_problem = str(error)
            log.error("a runner is refused for its kernel", extra={"runner": runner.name, "detail": str(error)})
            await asyncio.sleep(_WRONG_KERNEL_PAUSE_S)
            with contextlib.suppress(RunnersUnreachable):
                await self._replace(runner, Replaced.KERNEL)
        except RunnersUnreachable as error:
            self.last_problem = str(error)
        except (SandboxError, OSError) as error:
            self.last_problem = f"runner {runner.name} does not answer: {error}"
            runner.silent_proofs += 1
            if runner.silent_proofs >= _MAX_SILENT_PROOFS:
                with contextlib.suppress(RunnersUnreachable):
                    await self._replace(runner, Replaced.SILENT)
        finally:
            self._proofs.pop(runner.name, None)
            self._changed.set()

    def _offer(self, runner: Runner) -> None:
        """Mark a runner as ready, and lend it to the first waiter if there is one."""
        if self._runners.get(runner.name) is not runner or runner.state is RunnerState.QUARANTINED:
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

    async def _dismiss(self, runner: Runner) -> None:
        """End a runner for which there is no work."""
        log.info("a runner is not needed any more", extra={"runner": runner.name})
        self._runners.pop(runner.name, None)
        await self.source.remove(runner.found)

    async def _replace(self, runner: Runner, reason: Replaced) -> None:
        self._forget(runner, reason)
        await self.source.remove(runner.found)

    def _forget(self, runner: Runner, reason: Replaced) -> None:
        log.info("a runner is replaced", extra={"runner": runner.name, "reason": reason.value})
        self.replaced[reason] += 1
        self._runners.pop(runner.name, None)

    def _enter(self, runner: Runner, state: RunnerState) -> None:
        runner.state = state
        runner.since_s = asyncio.get_running_loop().time()
