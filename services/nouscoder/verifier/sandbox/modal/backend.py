"""The `modal` backend: each slot borrows a container of Modal, in which the same agent and harness run.

INVARIANT: as with `gvisor`, a container serves one submission at a time, and none after an unexpected, late or missing
answer until it has passed a canary. It serves no more than `container_for` allows. When a cap of the configuration or a
limit of Modal allows no container, submissions wait in the grader's queue: `usable_slots` tells the grader how many
slots have a container. With a container for each test, at most one (and its partners) is open for a submission, and it
serves at most one run of the first program, with the runs of the partners that follow it.

Candidates run on Modal's gVisor (or in its virtual machine), in a container that can open no connection. Inside it they
get the isolation of every backend (see `local`). The gateway is the only one that has the containers' key.
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial

from nouscoder.config import SandboxSection
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.sandbox.base import NO_FILES, BackendUse, Program, RunResult, Session
from nouscoder.verifier.sandbox.modal.cloud import ModalCloud
from nouscoder.verifier.sandbox.modal.containers import ModalRunners
from nouscoder.verifier.sandbox.runners.launch import RunnerAccess
from nouscoder.verifier.sandbox.runners.link import PoolKeys
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox
from nouscoder.verifier.sandbox.session import SlotSession
from nouscoder.verifier.sandbox.slot import Slot

Sessions = tuple[Session, ...]
_ADVICE = "look at the app's sandboxes and their logs on Modal's dashboard"


class FreshSandbox:
    """The open sandbox of a submission."""

    def __init__(self, reopen: Callable[[], AbstractAsyncContextManager[Sessions]], stack: AsyncExitStack) -> None:
        self._reopen = reopen
        self._stack = stack
        self._opened: Sessions | None = None
        self._is_used = False

    @staticmethod
    @contextlib.asynccontextmanager
    async def opened(reopen: Callable[[], AbstractAsyncContextManager[Sessions]]) -> AsyncIterator[Sessions]:
        """The sessions of the program and of its partners, in one sandbox after the other.

        The first one is opened now, so that code that does not compile is found on entry.
        """
        async with AsyncExitStack() as stack:
            sandbox = FreshSandbox(reopen, stack)
            opened = await sandbox.fresh()
            sandbox._is_used = False
            yield tuple(FreshSession(sandbox, index) for index in range(len(opened)))

    async def fresh(self) -> Sessions:
        """The sessions of a sandbox in which the first program has not run yet."""
        if self._is_used or self._opened is None:
            self._opened = None
            await self._stack.aclose()
            self._opened = await self._stack.enter_async_context(self._reopen())
        self._is_used = True
        return self._opened

    async def current(self) -> Sessions:
        """The sessions of the sandbox in which the first program has run."""
        return self._opened or await self.fresh()


class FreshSession:
    """Implements `Session`. Raises on a run what the backend raises when it opens a sandbox."""

    def __init__(self, sandbox: FreshSandbox, index: int) -> None:
        self._sandbox = sandbox
        self._index = index

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        """See `Session.run`."""
        sessions = await (self._sandbox.current() if self._index else self._sandbox.fresh())
        return await sessions[self._index].run(stdin, args=args, files=files)

    async def dialogue_with(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """See `Session.dialogue_with`."""
        sessions = await self._sandbox.fresh()
        return await sessions[0].dialogue_with(sessions[1], args=args, files=files)


class ModalSandbox(GvisorSandbox):
    """The pool of runners with containers of Modal as runners."""

    name = "modal"

    def __init__(self, config: SandboxSection, *, tool_slots: int = 0) -> None:
        """Raises SandboxUnavailable."""
        chosen, tls, key_text = config.modal, ssl.create_default_context(), secrets.token_hex(32)
        self.containers = ModalRunners(chosen, key_text, tls, ModalCloud(chosen))
        self.outer_layer = f"modal:{chosen.runtime}"
        self._container_for = chosen.container_for
        self._problems: dict[int, str] = {}  # of the last program of each slot
        changes = {"pool_min": -1}  # a constant number: caps bound the cost
        if chosen.container_for in ("submission", "test"):
            changes["max_sessions"] = 1
        config = config.model_copy(update=changes)
        access = RunnerAccess(PoolKeys(handshake.read_key(key_text)), tls, self.name, _ADVICE)
        super().__init__(config, self.containers, access, tool_slots=tool_slots)

    @property
    def use(self) -> BackendUse:
        """See `Sandbox`."""
        return replace(super().use, dollars=self.containers.spent(), limited_by=self.containers.capped or "")

    @contextlib.asynccontextmanager
    async def _sessions(self, program: Program, *partners: Program) -> AsyncIterator[Sessions]:
        opened = partial(super()._sessions, program, *partners)
        async with FreshSandbox.opened(opened) if self._container_for == "test" else opened() as sessions:
            yield sessions

    def _pick(self, program: Program) -> Slot:
        """A free slot whose container has served the same problem, else the one that is free for the longest time."""
        if self._container_for == "problem" and program.problem_id:
            for slot in self._free:
                if self._problems.get(slot.index) == program.problem_id:
                    self._free.remove(slot)
                    return slot
        return super()._pick(program)

    async def _opened(self, slot: Slot, program: Program) -> SlotSession:
        if self._container_for == "problem" and slot.index < self.num_slots:
            before = self._problems.get(slot.index)
            if before is not None and (before != program.problem_id or not before):
                await slot.stop(worn=True)
            self._problems[slot.index] = program.problem_id
        return await super()._opened(slot, program)
