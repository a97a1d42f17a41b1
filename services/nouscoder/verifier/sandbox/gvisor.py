"""The `gvisor` backend: each slot is lent a runner pod of its own, in which gVisor runs the same harness.

INVARIANT: no runner serves more than `max_sessions` submissions, one at a time; after a doubt it serves none before a
canary has been graded right in it, and one that grades the canary wrongly never serves again.

What it gives: candidates meet gVisor's sentry instead of the node's kernel, in a pod without a token, a writable root
or a way out; inside it they get what every backend gives them (see `local`). The gateway itself runs no candidate.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nouscoder.domain.submission import Limits
from nouscoder.verifier.harness.settings import SlotSettings
from nouscoder.verifier.runner import greeting
from nouscoder.verifier.sandbox.base import Exit, Program, SandboxError, SandboxUnavailable
from nouscoder.verifier.sandbox.config import PoolConfig, SandboxConfig
from nouscoder.verifier.sandbox.link import Ending, Link
from nouscoder.verifier.sandbox.local import LocalSandbox
from nouscoder.verifier.sandbox.pool import Runner, RunnerPool, Source
from nouscoder.verifier.sandbox.runner_link import SocketLink, connect
from nouscoder.verifier.sandbox.session import SlotSession
from nouscoder.verifier.sandbox.slot import Slot
from nouscoder.verifier.toolchains import languages

log = logging.getLogger(__name__)

_RETRY_S = 1.0
# Sees whether anything of an earlier submission is left: another process than init, another file than its own.
_CANARY = """import os
strangers = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())]
print(int(input()) * 7919 + 1, strangers, sorted(os.listdir("/tmp")))
"""
_CANARY_LIMITS = Limits(wall_time_s=10, cpu_time_s=10, memory_bytes=256 << 20, output_bytes=1 << 16, processes=8)


class GvisorSandbox(LocalSandbox):
    """See the module. The slots are the local backend's; what a slot is differs."""

    name = "gvisor"

    def __init__(self, config: SandboxConfig) -> None:
        """Raises SandboxUnavailable."""
        self._key = _read_key(config.pool)
        self.pool = RunnerPool(open_source(config.pool, self._key), self._prove, config.slots or 1, config.pool.spares)
        self._opening: set[asyncio.Task[None]] = set()
        super().__init__(config)

    async def start(self) -> None:
        """Open for work as soon as one slot has a runner; the others come when theirs are there.

        Raises SandboxUnavailable when none has one within `pool.start_s`.
        """
        await self.pool.start()
        self._open = True
        for slot in self._slots:
            self._bring_up(slot)
        try:
            async with asyncio.timeout(self._config.pool.start_s):
                while not self._free:
                    await asyncio.wait(self._opening, timeout=_RETRY_S, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.close()
            raise SandboxUnavailable(f"the gvisor sandbox cannot start: {self.pool.trouble}") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See `Sandbox`."""
        self._open = False
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        await super().close()
        await self.pool.close()

    @property
    def isolation(self) -> tuple[str, ...]:
        """See `Sandbox`."""
        left_out = ("namespace:user", "separate-users", "cgroup:")
        inner = (layer for layer in super().isolation if not layer.startswith(left_out))
        return ("gvisor:pod", *inner, "separate-users")

    @property
    def runners(self) -> Mapping[str, int]:
        """See `Sandbox`."""
        return {state.value: number for state, number in self.pool.states.items()}

    @property
    def replacements(self) -> Mapping[str, int]:
        """See `Sandbox`."""
        return {why.value: number for why, number in self.pool.replaced.items()}

    def _make_slot(self, index: int) -> Slot:
        if index < self.num_slots:
            return Slot(
                index, self._config, RunnerLaunch(self.pool, self._key, self._config), self._config.max_sessions
            )
        first = self._slots[index - self.num_slots]
        return Slot(index, self._config, PartnerLaunch(first.launch, self._key, self._config))

    def _bring_up(self, slot: Slot) -> None:
        task = asyncio.create_task(self._open_slot(slot), name=f"opening slot {slot.index}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_slot(self, slot: Slot) -> None:
        """Until it has a runner: then whoever waits may have it."""
        while True:
            try:
                await slot.ensure_usable()
            except SandboxError as error:
                log.warning("a slot has no runner yet", extra={"slot": slot.index, "detail": str(error)})
                await asyncio.sleep(_RETRY_S)
            else:
                self._hand_on(slot)
                return

    async def _give_back(self, slot: Slot) -> None:
        await slot.stop()
        if self._open:
            self._bring_up(slot)

    async def _prove(self, runner: Runner) -> bool:
        """Grade the canary in it. Raises SandboxError, OSError."""
        slot = Slot(-1, self._config, _ProofLaunch(runner, self._key, self._config))
        number = secrets.randbelow(1 << 30)
        program = Program(languages.registry()["python"], _CANARY, _CANARY_LIMITS)
        try:
            await slot.ensure_usable()
            slot.begin()
            session = SlotSession(slot, program, self._config)
            await session.compile()
            result = await session.run(b"%d\n" % number)
        finally:
            await slot.stop()
        right = f"{number * 7919 + 1} [] ['main.py']\n".encode()
        if (result.exit, result.stdout) != (Exit.EXITED, right):
            log.error("the canary of a runner says otherwise", extra={"runner": runner.name, "said": str(result)[:500]})
            return False
        return True


class RunnerLaunch:
    """See `Launch`: a runner of the pool, for as long as the link is open."""

    def __init__(self, pool: RunnerPool, key: bytes, config: SandboxConfig) -> None:
        self._pool = pool
        self._key = key
        self._config = config
        self.runner: Runner | None = None

    async def open(self) -> Link:
        """See `Launch`. Raises SandboxError."""
        runner = await self._pool.lend(self._config.start_limit_s)
        try:
            link = await _link(runner, self._key, self._config, greeting.SLOT, self._give_back)
        except BaseException:
            await self._pool.give_back(runner, Ending.DOUBT)
            raise
        self.runner = runner
        languages.use_tools(link.about.tools)
        return link

    async def _give_back(self, ending: Ending) -> None:
        runner, self.runner = self.runner, None
        if runner is not None:
            await self._pool.give_back(runner, ending)

    def explain(self, reason: str) -> str:
        """See `Launch`."""
        return f"the gvisor sandbox cannot start: {reason}; look at the runner pods (kubectl describe, kubectl logs)"


class PartnerLaunch(RunnerLaunch):
    """The second harness in the runner of a pair's first; it goes when that does."""

    def __init__(self, first: Any, key: bytes, config: SandboxConfig) -> None:
        self._first: RunnerLaunch = first
        self._key = key
        self._config = config

    async def open(self) -> Link:
        """See `Launch`. Raises SandboxError."""
        if self._first.runner is None:
            raise SandboxError("a partner was asked for without a first")
        return await _link(self._first.runner, self._key, self._config, greeting.PARTNER, None)


class _ProofLaunch(RunnerLaunch):
    """A runner that is not lent yet."""

    def __init__(self, runner: Runner, key: bytes, config: SandboxConfig) -> None:
        self.runner = runner
        self._key = key
        self._config = config

    async def open(self) -> Link:
        """See `Launch`. Raises SandboxError."""
        assert self.runner is not None
        return await _link(self.runner, self._key, self._config, greeting.SLOT, None)


async def _link(runner: Runner, key: bytes, config: SandboxConfig, want: str, closed: Any) -> SocketLink:
    """Raises SandboxError, OSError."""
    if runner.address is None:
        raise SandboxError(f"runner {runner.name} has no address")
    settings = SlotSettings(preload=config.preload, tmp_bytes=config.tmp_bytes)._asdict()
    try:
        limit_s = config.start_limit_s
        return await connect(runner.address, key, want, settings, name=runner.name, limit_s=limit_s, closed=closed)
    except TimeoutError as error:
        raise SandboxError(f"runner {runner.name} did not answer within {config.start_limit_s:.0f} s") from error


def open_source(config: PoolConfig, key: bytes) -> Source:
    """Where the runners come from: the one place that decides it. Raises SandboxUnavailable."""
    if not config.managed:
        from nouscoder.verifier.sandbox.headless import HeadlessRunners

        return HeadlessRunners(config.service, config.port, key)
    try:
        from nouscoder.verifier.sandbox.pods import ManagedPods
    except ImportError as error:
        raise SandboxUnavailable("the gvisor sandbox needs the Python package kubernetes (extra: cluster)") from error
    return ManagedPods(Path(config.template), config.port)


def _read_key(config: PoolConfig) -> bytes:
    try:
        return greeting.read_key(Path(config.key_file).read_text(encoding="utf8"))
    except (OSError, greeting.GreetingError) as error:
        raise SandboxUnavailable(
            f"verifier.sandbox.pool_key_file: {config.key_file} cannot be used: {error}"
        ) from error
