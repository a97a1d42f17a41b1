"""Runners in containers of Modal that this gateway makes, each behind its own TLS tunnel, and what they may cost.

INVARIANT: every container that Modal may have made for this gateway is known here, until Modal has confirmed its end.
One whose creation has failed or was cancelled is looked for in Modal's list, by the gateway's tag, and ended. The
money for a container stays reserved until its end is confirmed. A killed gateway ends none: Modal does, after `idle_s`
without a connection.

What has been paid, plus what the living containers cost if each lives as long as it may, is at most `caps.dollars`. So
the cap holds also if the gateway dies, because Modal ends each container after its lifetime. The living containers are
at most `max_containers`, and together cost at most `dollars_per_minute`. In no minute are more than
`creations_per_minute` requested; a request that Modal's client repeats, because Modal asks for it, counts once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from nouscoder.config import ModalSection
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.sandbox.base import Cap
from nouscoder.verifier.sandbox.modal.cloud import Container, ContainerRefused, ModalCloud
from nouscoder.verifier.sandbox.runners.pool import FoundRunner, RunnersLimited, RunnersUnreachable, Source

_SHORTEST_LIFE_S = 60  # a container that may live for a shorter time is not worth its start
_MINUTE_S = 60.0
_ROUNDING = 1e-9
log = logging.getLogger(__name__)
_SWEEP_S = 15.0
_PROBE_PAUSE_S = 0.2
_PROBE_LIMIT_S = 10.0
_FINISH_LIMIT_S = 10.0
_CLOSE_LIMIT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LAST_SUBMISSION_S = 600.0  # before its end a container takes no new submission for so long


@dataclass(frozen=True, slots=True)
class _Living:
    begun_s: float
    lifetime_s: float


@dataclass(slots=True)
class Budget:
    """Whether another container may be made, and what all of them cost. Pure: the caller gives the time in seconds.

    Each container costs `dollars_a_second` for at most `lifetime_s`.
    """

    caps: ModalSection
    _paid: float = 0.0  # for containers that have ended
    _living: dict[str, _Living] = field(default_factory=dict)
    _creations: deque[float] = field(default_factory=deque)

    def admit(self, name: str, now_s: float) -> int | Cap:
        """Count a new container `name` and return its lifetime in whole seconds, or return the cap that forbids it.

        The lifetime is shorter than `lifetime_s` when the rest of the money does not pay for more.
        """
        while self._creations and self._creations[0] <= now_s - _MINUTE_S:
            self._creations.popleft()
        number = len(self._living) + 1
        if number > self.caps.max_containers:
            return Cap.CONTAINERS
        if number * self.caps.dollars_a_second * _MINUTE_S > self.caps.dollars_per_minute + _ROUNDING:
            return Cap.DOLLARS_PER_MINUTE
        if len(self._creations) >= self.caps.creations_per_minute:
            return Cap.CREATIONS
        left = self.caps.dollars - self.committed()
        affordable_s = left / self.caps.dollars_a_second if self.caps.dollars_a_second else math.inf
        lifetime_s = math.floor(min(self.caps.lifetime_s, affordable_s))
        if lifetime_s < min(_SHORTEST_LIFE_S, self.caps.lifetime_s):
            return Cap.DOLLARS
        self._creations.append(now_s)
        self._living[name] = _Living(now_s, lifetime_s)
        return lifetime_s

    def ended(self, name: str, now_s: float) -> None:
        """Pay for a container that exists no more. Does nothing for one that was paid for already."""
        if (one := self._living.pop(name, None)) is not None:
            self._paid += self._cost(one, now_s)

    def refused(self, name: str) -> None:
        """Forget a container that was never made. Its request still counts for the creations of the minute."""
        self._living.pop(name, None)

    def spent(self, now_s: float) -> float:
        """Dollars for all containers until now. Any thread may call it, so it works on a copy."""
        return self._paid + sum(self._cost(one, now_s) for one in list(self._living.values()))

    def committed(self) -> float:
        """Dollars if every living container lives as long as it may."""
        return self._paid + self.caps.dollars_a_second * sum(one.lifetime_s for one in self._living.values())

    def _cost(self, one: _Living, now_s: float) -> float:
        return self.caps.dollars_a_second * min(one.lifetime_s, max(0.0, now_s - one.begun_s))

    def explain(self, cap: Cap) -> str:
        """One sentence for a person: which cap forbids another container, and its setting."""
        setting = f"verifier.sandbox.modal.{'max_containers' if cap is Cap.CONTAINERS else cap.value}"
        limit = getattr(self.caps, setting.rpartition(".")[2])
        return f"{setting} = {limit:g} allows no further container now ({len(self._living)} exist)"


@dataclass(slots=True)
class _Made:
    """A container from its request to its end. `id` and `address` are None until Modal has answered."""

    begun_s: float
    lifetime_s: int
    container: Container | None = None
    answered_s: float = math.inf
    reachable: bool = False
    ending: bool = False

    @property
    def use_until_s(self) -> float:
        return self.begun_s + self.lifetime_s - min(_LAST_SUBMISSION_S, self.lifetime_s / 4)


class ModalRunners(Source):
    """See `Source`. Modal does not tell who lacked memory: a container that it has killed has always one exit code."""

    def __init__(self, config: ModalSection, key_text: str, tls: ssl.SSLContext, cloud: ModalCloud) -> None:
        self.gateway = f"{socket.gethostname()[:40]}-{secrets.token_hex(6)}"
        self._config = config
        self._key_text = key_text
        self._tls = tls
        self._cloud = cloud
        self.budget = Budget(config)
        self.capped: Cap | None = None  # what kept the last container from being made
        self._made: dict[str, _Made] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_change: Callable[[], None] = lambda: None
        self._sweeper: asyncio.Task[None] | None = None
        self._is_open = False
        self._pause_s, self._not_before_s, self._problem = 0.0, -math.inf, ""

    async def start(self, on_change: Callable[[], None]) -> None:
        """See `Source`. Raises SandboxUnavailable as well."""
        self._on_change = on_change
        await self._cloud.open()
        self._is_open = True
        self._sweeper = self._begin(self._keep_sweeping(), "sweep of the containers")

    async def list(self) -> Sequence[FoundRunner]:
        """See `Source`."""
        now_s = time.monotonic()
        found = []
        for name, made in self._made.items():
            if not made.ending and now_s < made.use_until_s:
                address = made.container.address if made.container is not None and made.reachable else None
                found.append(FoundRunner(name, address, made.use_until_s))
        for name in [name for name, made in self._made.items() if now_s >= made.begun_s + made.lifetime_s]:
            self._forget(name)
        return found

    async def create(self) -> str | None:
        """See `Source`: the container is made meanwhile. Raises RunnersLimited."""
        now_s = time.monotonic()
        if now_s < self._not_before_s:
            raise RunnersLimited(f"{self._problem}; next attempt in {self._not_before_s - now_s:.0f} s")
        name = f"modal-{secrets.token_hex(6)}"
        admitted = self.budget.admit(name, now_s)
        if isinstance(admitted, Cap):
            self.capped = admitted
            raise RunnersLimited(self.budget.explain(admitted))
        self.capped = None
        self._made[name] = _Made(now_s, admitted)
        self._begin(self._start(name), f"start of {name}")
        return name

    async def _start(self, name: str) -> None:
        made = self._made[name]
        try:
            async with asyncio.timeout(self._config.start_s):
                made.container = await self._cloud.create(self.gateway, name, self._key_text, made.lifetime_s)
                made.answered_s = time.monotonic()
                await self._reach(made, made.container.address)
            self._pause_s = 0.0
        except (RunnersUnreachable, TimeoutError) as error:
            # A longer pause after each failure in a row.
            self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
            self._not_before_s = time.monotonic() + self._pause_s
            self._problem = str(error) or f"no container was reachable within {self._config.start_s:.0f} s"
            log.warning("a container was not made", extra={"detail": self._problem})
            if isinstance(error, ContainerRefused):
                self.budget.refused(name)
                del self._made[name]
            else:
                await self._end(name)
        finally:
            self._on_change()
        if made.ending and name in self._made:
            await self._end(name)

    async def _reach(self, made: _Made, address: tuple[str, int]) -> None:
        """Wait until the agent behind the tunnel begins its handshake. Until then Modal answers in its place."""
        while not made.ending:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(_PROBE_LIMIT_S):
                    reader, writer = await asyncio.open_connection(*address, ssl=self._tls, server_hostname=address[0])
                    try:
                        if await reader.readexactly(len(handshake.MAGIC)) == handshake.MAGIC:
                            made.reachable = True
                            return
                    finally:
                        writer.transport.abort()
            await asyncio.sleep(_PROBE_PAUSE_S)

    async def remove(self, runner: FoundRunner) -> None:
        """See `Source`. Modal's confirmation is not awaited."""
        self._begin(self._end(runner.name), f"end of {runner.name}")

    async def quarantine(self, runner: FoundRunner) -> None:
        """See `Source`. The container is ended, because it costs money. Modal keeps its log."""
        log.error("the container of a quarantined runner is ended", extra={"runner": runner.name})
        await self.remove(runner)

    async def _end(self, name: str) -> None:
        """End a container. When Modal does not confirm it, the sweep does it again."""
        made = self._made.get(name)
        if made is None:
            return
        made.ending = True
        if made.container is None:
            return  # the sweep looks for it
        try:
            await self._cloud.terminate(made.container.id)
        except RunnersUnreachable as error:
            log.warning("a container was not ended yet", extra={"runner": name, "detail": str(error)})
        else:
            self._forget(name)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            with contextlib.suppress(RunnersUnreachable):
                await self._sweep()

    async def _sweep(self) -> None:
        """Compare with Modal's list: forget what has ended, end what is not wanted. Raises RunnersUnreachable."""
        begun_s = time.monotonic()
        running = await self._cloud.running(self.gateway)
        by_id = {made.container.id: name for name, made in self._made.items() if made.container is not None}
        for container_id in running - by_id.keys():
            name = await self._cloud.runner_of(container_id)
            made = self._made.get(name)
            if made is None:
                await self._cloud.terminate(container_id)
            elif made.container is None and made.ending:
                made.container, made.answered_s = Container(container_id, ("", 0)), begun_s
        for name, made in list(self._made.items()):
            if made.container is None:
                if made.ending and begun_s - made.begun_s > 2 * self._config.start_s:
                    self._forget(name)  # Modal never made it
            elif made.container.id not in running:
                if begun_s - made.answered_s > _SWEEP_S:  # a list may be older than the newest containers
                    self._forget(name)
            elif made.ending:
                await self._end(name)
        self._on_change()

    def _forget(self, name: str) -> None:
        self._made.pop(name, None)
        self.budget.ended(name, time.monotonic())

    def spent(self) -> float:
        """Dollars for all containers until now, by the configured prices. Any thread may call it."""
        return self.budget.spent(time.monotonic())

    async def close(self) -> None:
        """See `Source`: end all containers, also those whose creation was in progress."""
        if not self._is_open:
            return
        self._is_open = False
        for made in self._made.values():
            made.ending = True
        # Creations in progress end for a while, because a cancelled one may still make a container.
        if self._sweeper is not None:
            self._sweeper.cancel()
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_FINISH_LIMIT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await asyncio.gather(*(self._end(name) for name in list(self._made)))
                for container_id in await self._cloud.running(self.gateway):
                    await self._cloud.terminate(container_id)
                await self._cloud.close()
        except TimeoutError as error:
            raise RunnersUnreachable(f"Modal did not end all containers within {_CLOSE_LIMIT_S:.0f} s") from error

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
