"""The `local` backend: namespaces, seccomp and rlimits of this host, a warm interpreter a slot.

INVARIANT: a slot is in the free queue or with exactly one session; sessions get slots in the order they asked.

What it gives: fresh user, pid, mount, net, ipc and uts namespaces a submission; a fresh process and /tmp a test; a
read-only root without the host's files; no capabilities, no new privileges, a seccomp allow-list. As the host's root,
init and candidates have two host users of their own a slot; without root they share the service's own user, so that a
kernel bug in user namespaces weighs more, and init is kept from them by being undumpable. What it does not cover:
kernel bugs reachable through the allowed calls, and timing seen through shared caches and cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping

from nouscoder.verifier.harness import frames
from nouscoder.verifier.harness.frames import Kind
from nouscoder.verifier.harness.settings import SlotSettings
from nouscoder.verifier.sandbox.base import (
    NO_FILES,
    CompileFailed,
    Exit,
    PartnerCompileFailed,
    Program,
    RunResult,
    SandboxError,
    Session,
    check_given,
)
from nouscoder.verifier.sandbox.config import SandboxConfig
from nouscoder.verifier.sandbox.launch import HostLaunch
from nouscoder.verifier.sandbox.slot import Slot, host_is_root

_EXITS = {
    frames.Ended.EXITED: Exit.EXITED,
    frames.Ended.SIGNALLED: Exit.SIGNALLED,
    frames.Ended.TIME_LIMIT: Exit.TIME_LIMIT,
    frames.Ended.MEMORY_LIMIT: Exit.MEMORY_LIMIT,
    frames.Ended.OUTPUT_LIMIT: Exit.OUTPUT_LIMIT,
}
_FIRST_UID = 1_000_000_000  # far from any user of the host; two a slot, apart for each service process
_UIDS_A_SERVICE = 4096
_PYTHON_COMPILE_TIME_S = 10.0
_ISOLATION = (
    *(f"namespace:{kind}" for kind in ("user", "pid", "mount", "net", "ipc", "uts")),
    "read-only-root",
    "no-capabilities",
    "no-new-privileges",
    "seccomp",
    "rlimits",
)


class LocalSandbox:
    """See the module."""

    name = "local"

    def __init__(self, config: SandboxConfig) -> None:
        self.num_slots = config.slots or len(os.sched_getaffinity(0))
        self._config = config
        self._slots = [self._make_slot(i) for i in range(self.num_slots)]
        # One beside each slot, started when a pair first needs it.
        seconds = range(self.num_slots, 2 * self.num_slots)
        self._seconds = {first.index: self._make_slot(i) for first, i in zip(self._slots, seconds, strict=True)}
        self._free: deque[Slot] = deque()
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._open = False

    def _make_slot(self, index: int) -> Slot:
        return Slot(index, self._config, HostLaunch(self._config, _slot_settings(self._config, index)))

    async def start(self) -> None:
        """Bring every slot up. Raises SandboxUnavailable."""
        try:
            await asyncio.gather(*(slot.ensure_ready() for slot in self._slots))
        except BaseException:
            await self.close()
            raise
        self._free.extend(self._slots)
        self._open = True

    @contextlib.asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[LocalSession]:
        """See `Sandbox.session`."""
        async with self._slot() as slot:
            yield await self._opened(slot, program)

    @contextlib.asynccontextmanager
    async def pair(self, program: Program, partner: Program) -> AsyncIterator[tuple[LocalSession, LocalSession]]:
        """See `Sandbox.pair`."""
        async with self._slot() as slot:
            first = await self._opened(slot, program)
            second = self._seconds[slot.index]
            try:
                yield first, await self._opened_partner(second, partner)
            finally:
                await asyncio.shield(second.release() if self._open else second.stop())

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[Slot]:
        slot = await self._acquire()
        try:
            yield slot
        finally:
            await asyncio.shield(self._give_back(slot))

    async def _opened(self, slot: Slot, program: Program) -> LocalSession:
        await slot.ensure_ready()
        slot.begin()
        session = LocalSession(slot, program, self._config)
        await session.compile()
        return session

    async def _opened_partner(self, slot: Slot, program: Program) -> LocalSession:
        try:
            return await self._opened(slot, program)
        except CompileFailed as failure:
            raise PartnerCompileFailed(failure.detail) from failure

    @property
    def isolation(self) -> tuple[str, ...]:
        """See `Sandbox`."""
        users = ("separate-users",) if host_is_root() else ()
        return (*_ISOLATION, *users)

    def pids(self) -> list[int]:
        """Process ids of the slots' zygotes, for tests and diagnosis."""
        return [slot.pid for slot in (*self._slots, *self._seconds.values()) if slot.pid is not None]

    async def close(self) -> None:
        """Kill every slot; sessions waiting for one get SandboxError."""
        self._open = False
        self._free.clear()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(SandboxError("the sandbox was closed"))
        await asyncio.gather(*(slot.stop() for slot in (*self._slots, *self._seconds.values())))

    async def _acquire(self) -> Slot:
        if not self._open:
            raise SandboxError("the sandbox is not open")
        if self._free:
            return self._free.popleft()
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._hand_on(waiter.result())
            raise

    async def _give_back(self, slot: Slot) -> None:
        await slot.release()
        if self._open:
            self._hand_on(slot)
        else:
            await slot.stop()

    def _hand_on(self, slot: Slot) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self._free.append(slot)


class LocalSession:
    """One submission in one slot."""

    def __init__(self, slot: Slot, program: Program, config: SandboxConfig) -> None:
        self._slot = slot
        self._program = program
        self._grace_s = config.grace_s
        self._running = False
        by_exec = program.language.run is not None
        self._compile_time_s = config.compile_time_s if by_exec else _PYTHON_COMPILE_TIME_S

    async def compile(self) -> None:
        """Send the program. Raises CompileFailed, SandboxError."""
        limits, language = self._program.limits, self._program.language
        payload = {
            "code": self._program.code,
            "prelude": self._program.prelude,
            "entry_point": self._program.entry_point,
            "source_name": language.source_name,
            "compile_argv": language.compile,
            "run_argv": language.run,
            "compile_time_s": self._compile_time_s,
            "cpu_time_s": limits.cpu_time_s,
            "wall_time_s": limits.wall_time_s,
            "memory_bytes": limits.memory_bytes,
            "extra_space_bytes": language.memory_extra_bytes,
            "output_bytes": limits.output_bytes,
            "processes": limits.processes,
        }
        await self._slot.send(Kind.PROGRAM, json.dumps(payload).encode())
        kind, detail = await self._receive(self._compile_time_s)
        if kind is Kind.COMPILE_FAILED:
            raise CompileFailed(detail.decode("utf-8", "replace"))
        if kind is not Kind.COMPILED:
            await self._slot.stop()
            raise SandboxError(f"slot {self._slot.index} answered {kind.name} to a program")

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        """See `Session.run`. Raises RuntimeError when another run of this session is under way."""
        check_given(self._program, args, files)
        with self._one_at_a_time():
            await self._give(args, files)
            await self._slot.send(Kind.RUN, stdin)
            kind, payload = await self._receive(self._program.limits.wall_time_s)
            if kind is not Kind.RESULT:
                await self._slot.stop()
                raise SandboxError(f"slot {self._slot.index} answered {kind.name} to a run")
        return _to_result(payload)

    async def converse(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """See `Session.converse`."""
        if not isinstance(partner, LocalSession):
            raise TypeError("a session converses with the partner of its own pair")
        check_given(partner._program, args, files)
        with self._one_at_a_time(), partner._one_at_a_time():
            await partner._give(args, files)
            await self._slot.send(Kind.TALK)
            await partner._slot.send(Kind.TALK)
            try:
                async with asyncio.TaskGroup() as group:
                    one = group.create_task(self._relay(partner))
                    other = group.create_task(partner._relay(self))
            except* SandboxError as errors:
                raise SandboxError(str(errors.exceptions[0])) from errors
        return one.result(), other.result()

    async def _relay(self, listener: LocalSession) -> RunResult:
        """Pass on what this one says until it ends."""
        while True:
            kind, payload = await self._receive(self._program.limits.wall_time_s)
            if kind is Kind.OUTPUT:
                await listener._slot.send(Kind.INPUT, payload)
            elif kind is Kind.RESULT:
                await listener._slot.send(Kind.INPUT_END)
                return _to_result(payload)
            else:
                await self._slot.stop()
                raise SandboxError(f"slot {self._slot.index} answered {kind.name} in a conversation")

    async def _give(self, args: tuple[str, ...], files: Mapping[str, bytes]) -> None:
        if args or files:
            await self._slot.send(Kind.GIVEN, frames.pack_given(args, files))

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if self._running:
            raise RuntimeError("runs of one session are sequential")
        self._running = True
        try:
            yield
        finally:
            self._running = False

    async def _receive(self, limit_s: float) -> tuple[Kind, bytes]:
        try:
            return await self._slot.receive(limit_s + self._grace_s)
        except SandboxError:
            await self._slot.stop()
            raise


def _to_result(payload: bytes) -> RunResult:
    r = frames.unpack_result(payload)
    exit_ = _EXITS[frames.Ended(r.ended)]
    return RunResult(
        exit_, r.exit_code, r.signal, r.wall_time_s, r.cpu_time_s, r.memory_bytes, r.stdout, r.stderr, r.result
    )


def _slot_settings(config: SandboxConfig, index: int) -> SlotSettings:
    first = _FIRST_UID + (os.getpid() % 65536) * _UIDS_A_SERVICE + 2 * index
    return SlotSettings(
        site_packages=tuple(str(folder.resolve()) for folder in config.site_packages),
        preload=config.preload,
        tmp_bytes=config.tmp_bytes,
        uid_init=first if host_is_root() else None,
        uid_candidate=first + 1 if host_is_root() else None,
    )
