"""How a slot, its partner and a canary start their harness in a runner, and which runners a submission may use."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from nouscoder.config import SandboxSection
from nouscoder.verifier.harness.frames import SlotSettings
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.sandbox.base import SandboxError
from nouscoder.verifier.sandbox.runners.link import KernelUnproven, PoolKeys, SocketLink, connect_by_any
from nouscoder.verifier.sandbox.runners.pool import Runner, RunnerPool
from nouscoder.verifier.sandbox.slot import ENVIRONMENT, Launch, Link, Slot
from nouscoder.verifier.toolchains import languages


@dataclass(frozen=True, slots=True)
class RunnerAccess:
    """How the runners of a pool are reached, and how a person looks at them. `tls` is that of a tunnel (`connect`).

    `refusal` is given what a runner says of its kernel (runner/kernel.py). It returns why no program may run there;
    empty: programs may.
    """

    keys: PoolKeys
    tls: ssl.SSLContext | None = None
    backend: str = "gvisor"
    advice: str = "look at the runner pods (kubectl describe, kubectl logs)"
    refusal: Callable[[object], str] = lambda _: ""


class RunnerLaunch(Launch):
    """Starts a harness in `runner`, which is not lent, for a canary. Base of the launches that use others."""

    def __init__(self, access: RunnerAccess, config: SandboxSection, runner: Runner | None = None) -> None:
        self._access = access
        self._config = config
        self.runner = runner

    def explain(self, reason: str) -> str:
        """See `Launch`."""
        return f"the {self._access.backend} sandbox cannot start: {reason}; {self._access.advice}"

    async def open(self) -> Link:
        """See `Launch`. Raises SandboxError."""
        assert self.runner is not None
        return await self._connect(self.runner, handshake.SLOT)

    async def _connect(
        self, runner: Runner, want: str, closed: Callable[[bool], Awaitable[None]] | None = None
    ) -> SocketLink:
        """Start a harness in `runner`. Raises SandboxError, OSError."""
        if runner.address is None:
            raise SandboxError(f"runner {runner.name} has no address")
        settings = SlotSettings(tmp_bytes=self._config.tmp_bytes)._asdict()
        del settings["groups"]  # those of this host; runners of an older version do not know the key
        request = {
            "settings": settings,
            "environment": ENVIRONMENT,
            "tools": languages.all_tools(),
            "search_path": languages.SEARCH_PATH,
        }
        limit_s = self._config.start_limit_s
        try:
            link = await connect_by_any(
                runner.address,
                self._access.keys,
                want,
                request,
                name=runner.name,
                limit_s=limit_s,
                tls=self._access.tls,
            )
        except TimeoutError as error:
            raise SandboxError(f"runner {runner.name} did not answer within {limit_s:.0f} s") from error
        if reason := self._access.refusal(link.kernel):
            link.writer.transport.abort()
            raise KernelUnproven(f"runner {runner.name} {reason}")
        link.closed, link.use_until_s = closed, runner.use_until_s
        return link


class PooledLaunch(RunnerLaunch):
    """Borrows a runner from the pool for as long as the link is open."""

    def __init__(self, pool: RunnerPool, access: RunnerAccess, config: SandboxSection) -> None:
        super().__init__(access, config)
        self._pool = pool
        self._last: Runner | None = None  # also after it was given back

    async def lacked_memory(self) -> bool:
        """See `Launch`. Only this one knows: what a partner or a canary needs is not the candidate's."""
        return self._last is not None and await self._pool.source.lacked_memory(self._last.found)

    async def open(self) -> Link:
        """See `Launch`. Raises SandboxError."""
        self._last = runner = await self._pool.lend(self._config.start_limit_s)
        try:
            link = await self._connect(runner, handshake.SLOT, self._give_back)
        except BaseException:
            await self._pool.give_back(runner, worn=False)
            raise
        self.runner = runner
        languages.offer(self._pool, link.tools)
        return link

    async def _give_back(self, worn: bool) -> None:
        runner, self.runner = self.runner, None
        if runner is not None:
            await self._pool.give_back(runner, worn=worn)


class PartnerLaunch(RunnerLaunch):
    """Starts another harness of a pair in the runner of the first. The runner kills all together."""

    def __init__(self, first: Launch, role: str, access: RunnerAccess, config: SandboxSection) -> None:
        super().__init__(access, config)
        assert isinstance(first, RunnerLaunch)
        self._first = first
        self._role = role

    async def open(self) -> Link:
        """See `Launch`. Raises SandboxError."""
        if self._first.runner is None:
            raise SandboxError("the first harness of the pair has not been started")
        return await self._connect(self._first.runner, self._role)


def runner_of(slot: Slot) -> str | None:
    """The name of the runner that a slot has borrowed."""
    launch = slot.launch
    return launch.runner.name if isinstance(launch, RunnerLaunch) and launch.runner is not None else None
