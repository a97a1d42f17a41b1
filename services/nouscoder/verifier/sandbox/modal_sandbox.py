"""The `modal` backend: each slot borrows a container of Modal, in which the same agent and harness run.

INVARIANT: as with `gvisor`, a container serves one submission at a time, and none after an unexpected, late or missing
answer until it has passed a canary. It serves no more than `container_for` allows. When a cap of the configuration or a
limit of Modal allows no container, submissions wait in the grader's queue: `usable_slots` tells the grader how many
slots have a container.

Candidates run on Modal's gVisor (or in its virtual machine), in a container that can open no connection. Inside it they
get the isolation of every backend (see `local`). The gateway is the only one that has the containers' key.
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace

from nouscoder.verifier.runner import greeting
from nouscoder.verifier.sandbox.base import Program, Session
from nouscoder.verifier.sandbox.config import SandboxConfig
from nouscoder.verifier.sandbox.fresh_runs import FreshSandbox
from nouscoder.verifier.sandbox.gvisor import GvisorSandbox
from nouscoder.verifier.sandbox.modal_cloud import ModalCloud
from nouscoder.verifier.sandbox.modal_config import ContainerFor
from nouscoder.verifier.sandbox.modal_runners import Cloud, ModalRunners
from nouscoder.verifier.sandbox.pool_keys import PoolKeys
from nouscoder.verifier.sandbox.runner_launch import RunnerAccess
from nouscoder.verifier.sandbox.session import SlotSession
from nouscoder.verifier.sandbox.slot import Slot

_ADVICE = "look at the app's sandboxes and their logs on Modal's dashboard"
_ONE_SUBMISSION = (ContainerFor.SUBMISSION, ContainerFor.TEST)


class ModalSandbox(GvisorSandbox):
    """The pool of runners with containers of Modal as runners."""

    name = "modal"

    def __init__(self, config: SandboxConfig, cloud: Cloud | None = None) -> None:
        """Raises SandboxUnavailable."""
        chosen, tls, key_text = config.modal, ssl.create_default_context(), secrets.token_hex(32)
        self.containers = ModalRunners(chosen, key_text, tls, cloud or ModalCloud(chosen))
        self.outer_layer = f"modal:{chosen.runtime}"
        self._container_for = chosen.container_for
        self._problems: dict[int, str] = {}  # of the last program of each slot
        config = replace(config, pool=replace(config.pool, least=None))  # a constant number: caps bound the cost
        if chosen.container_for in _ONE_SUBMISSION:
            config = replace(config, max_sessions=1)
        access = RunnerAccess(PoolKeys(greeting.read_key(key_text)), tls, self.name, _ADVICE)
        super().__init__(config, self.containers, access)

    @property
    def dollars(self) -> float:
        """See `Priced`."""
        return self.containers.spent()

    @property
    def limited_by(self) -> str:
        """See `Priced`."""
        return self.containers.capped.value if self.containers.capped is not None else ""

    @contextlib.asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[Session]:
        """See `Sandbox`."""
        if self._container_for is not ContainerFor.TEST:
            async with super().session(program) as session:
                yield session
            return
        async with FreshSandbox.opened(lambda: _alone(super(ModalSandbox, self).session(program))) as fresh:
            yield fresh.sessions[0]

    @contextlib.asynccontextmanager
    async def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AsyncIterator[tuple[Session, ...]]:
        """See `Sandbox`."""
        if self._container_for is not ContainerFor.TEST:
            async with super().with_partners(program, partner, checker) as sessions:
                yield sessions
            return
        async with FreshSandbox.opened(
            lambda: super(ModalSandbox, self).with_partners(program, partner, checker)
        ) as fresh:
            yield fresh.sessions

    def _pick(self, program: Program) -> Slot:
        """A free slot whose container has served the same problem, else the one that is free for the longest time."""
        if self._container_for is ContainerFor.PROBLEM and program.problem_id:
            for slot in self._free:
                if self._problems.get(slot.index) == program.problem_id:
                    self._free.remove(slot)
                    return slot
        return super()._pick(program)

    async def _opened(self, slot: Slot, program: Program) -> SlotSession:
        if self._container_for is ContainerFor.PROBLEM and slot.index < self.num_slots:
            before = self._problems.get(slot.index)
            if before is not None and (before != program.problem_id or not before):
                await slot.stop(worn=True)
            self._problems[slot.index] = program.problem_id
        return await super()._opened(slot, program)


@contextlib.asynccontextmanager
async def _alone(
    session: contextlib.AbstractAsyncContextManager[Session],
) -> AsyncIterator[tuple[Session, ...]]:
    async with session as opened:
        yield (opened,)
