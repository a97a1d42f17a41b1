"""The `local` backend: namespaces, seccomp and rlimits of this host, with one warm interpreter per slot.

INVARIANT: a slot is in the free queue or belongs to exactly one session. Sessions get slots in order of request. No
candidate has a descriptor of a socket between two slots, and the gateway reads and writes none. Both ends stay open in
the gateway, so that a slot that starts again gets the same end.

Isolation: fresh user, pid, mount, ipc and uts namespaces per submission; a network namespace in which no other program
has made a socket; a fresh process and /tmp per test; a read-only root without the host's files; no capabilities, no new
privileges, a seccomp allow-list. If the service runs as root, init and candidates have two host users per slot.
Otherwise they share the service's user: a kernel bug in user namespaces is then more dangerous, and init is protected
from candidates by not being dumpable. Not covered: kernel bugs reachable through the allowed calls, and timing through
shared caches and cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from nouscoder.config import SandboxSection
from nouscoder.verifier.harness.frames import SlotSettings
from nouscoder.verifier.sandbox.base import (
    BackendUse,
    CompileFailed,
    PartnerCompileFailed,
    Program,
    Sandbox,
    SandboxError,
    Session,
)
from nouscoder.verifier.sandbox.cgroup import UNGROUPED, Groups
from nouscoder.verifier.sandbox.compile_cache import CompileCache
from nouscoder.verifier.sandbox.init_build import HARNESS, init_library_path
from nouscoder.verifier.sandbox.session import SlotDialogue, SlotSession
from nouscoder.verifier.sandbox.slot import Launch, Link, ProcessLink, Slot, host_is_root
from nouscoder.verifier.toolchains.languages import ToolsMissing, cache_folders, in_slot, offer, withdraw

ENTRY_NAME = "__main__.py"  # of the harness
_FIRST_UID = 1_000_000_000  # above any user of the host; two per slot, different for each service process
_UIDS_A_SERVICE = 4096
_COMPILER_MEMORY_BYTES, _COMPILER_PROCESSES = 2 * 1024**3, 256  # as in harness/init/program.c
_OWN_BYTES, _OWN_PROCESSES = 256 * 1024**2, 16
_ISOLATION = (
    *(f"namespace:{kind}" for kind in ("user", "pid", "mount", "net", "ipc", "uts")),
    "read-only-root",
    "no-capabilities",
    "no-new-privileges",
    "seccomp",
    "rlimits",
)


class DialogueSockets:
    """The socket pair of a slot and its partner slot, by which their inits exchange the pipes of a dialogue.

    It is made when first needed (see harness/init/dialogue.c).
    """

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def descriptor(self, index: int) -> int:
        """The descriptor of one end: that of the slot (0), or of its partner slot (1). Raises OSError."""
        if self._ends is None:
            self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return self._ends[index].fileno()

    def close(self) -> None:
        """Close both ends in the gateway."""
        ends, self._ends = self._ends, None
        for end in ends or ():
            end.close()


class LocalSandbox(Sandbox):
    """The pool of slots on this host."""

    name = "local"
    _keeps_compiled = True  # only where a taken-over slot is a taken-over host (compile_cache.py)

    def __init__(self, config: SandboxSection, *, tool_slots: int = 0) -> None:
        """`tool_slots` are further slots, for tool sessions."""
        self.num_slots = (config.slots or len(os.sched_getaffinity(0))) + tool_slots
        self._config = config
        self._groups = Groups()
        self._peers = [DialogueSockets() for _ in range(self.num_slots)]
        self._slots = [self._make_slot(i) for i in range(self.num_slots)]
        self._partners: dict[int, Slot] = {}  # by index, made when a pair first needs them
        self._free: deque[Slot] = deque()
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._open = False
        self.compiled = CompileCache(config.compile_cache_bytes if self._keeps_compiled else 0)

    def _make_slot(self, index: int) -> Slot:
        role, of = divmod(index, self.num_slots)
        peer = partial(self._peers[of].descriptor, role) if role < 2 else None  # a checker has no dialogue
        group = self._groups.make(index)
        settings = _slot_settings(self._config, index)._replace(groups=group.procs_files)
        return Slot(index, self._config, HostLaunch(self._config, settings, peer), group=group)

    async def start(self) -> None:
        """Start every slot. Raises SandboxUnavailable."""
        offer(self, None)
        try:
            await asyncio.gather(*(slot.ensure_usable() for slot in self._slots))
        except BaseException:
            await self.close()
            raise
        self._free.extend(self._slots)
        self._open = True

    @contextlib.asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[Session]:
        async with self._sessions(program) as (session,):
            yield session

    def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> contextlib.AbstractAsyncContextManager[tuple[Session, ...]]:
        return self._sessions(program, partner, *(() if checker is None else (checker,)))

    @contextlib.asynccontextmanager
    async def _sessions(self, program: Program, *partners: Program) -> AsyncIterator[tuple[Session, ...]]:
        async with self._slot(program) as slot, contextlib.AsyncExitStack() as stack:
            sessions: list[Session] = [await self._opened(slot, program)]
            for number, one in enumerate(partners, 1):
                of_slot = self._partner(slot, number)
                stack.push_async_callback(self._end_partner, of_slot)
                sessions.append(await self._opened_partner(of_slot, one))
            yield tuple(sessions)

    def _partner(self, slot: Slot, number: int) -> Slot:
        """The partner slot of `slot` for a checker or an interactor (1), or for the checker of an interactor (2)."""
        index = number * self.num_slots + slot.index
        if index not in self._partners:
            self._partners[index] = self._make_slot(index)
        return self._partners[index]

    async def _end_partner(self, slot: Slot) -> None:
        if not (self._open and slot.end_session()):
            await asyncio.shield(slot.stop())

    @contextlib.asynccontextmanager
    async def dialogue(self, program: Program) -> AsyncIterator[SlotDialogue]:
        async with self._slot(program) as slot:
            yield await (await self._opened(slot, program)).start_dialogue()

    @contextlib.asynccontextmanager
    async def _slot(self, program: Program) -> AsyncIterator[Slot]:
        slot = await self._acquire(program)
        try:
            yield slot
        finally:
            if self._open and slot.end_session():
                self._release(slot)
            else:
                await asyncio.shield(self._restart(slot))

    async def _opened(self, slot: Slot, program: Program) -> SlotSession:
        limits = _group_limits(program, self._config)
        await slot.ensure_usable()
        slot.group.widen(**limits)  # not narrowed yet: the previous session may still be ending
        session = SlotSession(slot, _with_tools_of(slot, program), self._config, self.compiled)
        session.begin()
        await session.compile()
        session.bound_memory()
        slot.group.limit(pids=limits["pids"])
        return session

    async def _opened_partner(self, slot: Slot, program: Program) -> SlotSession:
        try:
            return await self._opened(slot, program)
        except CompileFailed as failure:
            raise PartnerCompileFailed(failure.detail) from failure

    @property
    def isolation(self) -> tuple[str, ...]:
        users = ("separate-users",) if host_is_root() else ()
        grouped = self._slots[0].group is not UNGROUPED
        return (*_ISOLATION, *users, *(f"cgroup:{name}" for name in self._groups.names if grouped))

    @property
    def use(self) -> BackendUse:
        kept = self.compiled
        return BackendUse(compile_cache=(kept.num_hits, kept.num_misses, kept.num_bytes))

    def pids(self) -> list[int]:
        """Process ids of the slots' zygotes, for tests and diagnosis."""
        return [slot.pid for slot in (*self._slots, *self._partners.values()) if slot.pid is not None]

    async def close(self) -> None:
        """Kill every slot. Waiting sessions get SandboxError."""
        self._open = False
        withdraw(self)
        self._free.clear()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(SandboxError("the sandbox was closed"))
        slots = (*self._slots, *self._partners.values())
        await asyncio.gather(*(slot.stop() for slot in slots))
        for slot in slots:
            await asyncio.to_thread(slot.group.remove)
        for sockets in self._peers:
            sockets.close()
        self.compiled.close()

    def _pick(self, program: Program) -> Slot:
        """Take the free slot in which `program` runs. There is one."""
        return self._free.popleft()

    async def _acquire(self, program: Program) -> Slot:
        if not self._open:
            raise SandboxError("the sandbox is not open")
        if self._free:
            return self._pick(program)
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result())
            raise

    async def _restart(self, slot: Slot) -> None:
        """Stop a slot whose state is in doubt. Its next session starts it again."""
        await slot.stop()
        if self._open:
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self._free.append(slot)


def _with_tools_of(slot: Slot, program: Program) -> Program:
    try:
        language = in_slot(program.language, slot.tools)
    except ToolsMissing as error:
        raise SandboxError(f"slot {slot.index} cannot run the program: {error}") from error
    return program if language is program.language else replace(program, language=language)


def _group_limits(program: Program, config: SandboxSection) -> dict[str, int]:
    """The limits of a slot's group until the program is compiled: the program or its compiler, files in tmpfs, and the
    slot's own processes.
    """
    limits, compiles = program.limits, program.language.compile is not None
    files = 2 * config.tmp_bytes + 4 * limits.output_bytes
    memory = max(limits.memory_bytes, _COMPILER_MEMORY_BYTES if compiles else 0)
    processes = max(limits.processes, _COMPILER_PROCESSES if compiles else 0)
    return {"memory": memory + files + _OWN_BYTES, "pids": processes + _OWN_PROCESSES}


def _slot_settings(config: SandboxSection, index: int) -> SlotSettings:
    first = _FIRST_UID + (os.getpid() % 65536) * _UIDS_A_SERVICE + 2 * index
    return SlotSettings(
        site_packages=tuple(str(folder.resolve()) for folder in config.site_packages),
        read_only=cache_folders(),
        init_library=str(init_library_path()),
        tmp_bytes=config.tmp_bytes,
        uid_init=first if host_is_root() else None,
        uid_candidate=first + 1 if host_is_root() else None,
    )


class HostLaunch(Launch):
    """Starts the interpreter on this host. The harness then makes namespaces of the host's kernel."""

    def __init__(self, config: SandboxSection, settings: SlotSettings, peer: Callable[[], int] | None) -> None:
        self._python = interpreter(config)
        self._settings = settings
        self._peer = peer

    async def open(self) -> Link:
        """Start the harness by its path. Killing the zygote kills every pid namespace below it."""
        peer = self._peer() if self._peer is not None else None
        settings = self._settings if peer is None else self._settings._replace(peer=peer)
        command = [*python_command(self._python, HARNESS / ENTRY_NAME), settings.to_json()]
        return await ProcessLink.start(command, peer=peer)

    def explain(self, reason: str) -> str:
        hint = ""
        if any(word in reason for word in ("clone", "unshare", "Operation not permitted")):
            hint = (
                " (this host does not allow namespaces: run the verifier as root with CAP_SYS_ADMIN, or allow"
                " them with sysctl user.max_user_namespaces=10000 and"
                " kernel.apparmor_restrict_unprivileged_userns=0)"
            )
        elif "/proc" in reason:
            hint = " (the container hides parts of /proc: start it with an unmasked /proc, or use another backend)"
        return f"the local sandbox cannot start: {reason}{hint}"


def interpreter(config: SandboxSection) -> str:
    """The Python interpreter of candidates."""
    return config.python or getattr(sys, "_base_executable", "") or sys.executable


def python_command(python: str, entry: Path) -> list[str]:
    """The command of an isolated interpreter: no user site, no site-packages, no environment, UTF-8."""
    return [python, "-I", "-S", "-X", "utf8", str(entry)]
