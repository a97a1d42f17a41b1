"""The `gvisor` and `userns` backends: each slot borrows a runner pod, in which the same harness runs.

INVARIANT: a runner serves at most `max_sessions` submissions, one at a time. After an unexpected, late or missing
answer it serves no submission until it has passed a canary. A runner that fails the canary never serves again. A slot
has a runner, gets one, or is parked; `usable_slots` tells the grader how many have one, and others wait in its queue.
The number of slots with a runner is never below the demand of now within `least` and `most`. It shrinks only when the
demand has been lower for `idle_s` seconds, and with `least` 0 it then reaches 0, spares included.

Candidates run in a pod without a service account token, writable root or network access. Inside it they get the
isolation of every backend (see `local`). The gateway runs no candidate. What is around them differs:

- `gvisor`: they run on gVisor's sentry instead of the node's kernel.
- `userns`: they run on the node's kernel, in a pod with users of its own (hostUsers: false). Its root is nobody on the
  node, and each candidate is in a further user namespace. That is several times faster, because a fork is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import string
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.installation import how_to_install
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.runner.kernel import why_not_gvisor, why_not_userns
from nouscoder.verifier.sandbox.base import BackendUse, Exit, Program, SandboxError, SandboxUnavailable
from nouscoder.verifier.sandbox.local import LocalSandbox
from nouscoder.verifier.sandbox.runners.launch import PartnerLaunch, PooledLaunch, RunnerAccess, RunnerLaunch, runner_of
from nouscoder.verifier.sandbox.runners.link import PoolKeys, connect_by_any
from nouscoder.verifier.sandbox.runners.pool import FoundRunner, Runner, RunnerPool, RunnersUnreachable, Source
from nouscoder.verifier.sandbox.session import SlotSession
from nouscoder.verifier.sandbox.slot import Slot
from nouscoder.verifier.toolchains import languages

log = logging.getLogger(__name__)
_RETRY_S = 1.0
_WARN_EVERY_S = 30.0
_KEY_CHECK_S = 5.0
_SIZE_CHECK_S = 1.0
_RESOLVE_LIMIT_S = 5.0
_NOT_GVISOR = (
    "the handler of its RuntimeClass must be runsc; verifier.sandbox.pool_accept_unproven_kernel = true (chart:"
    " verifier.sandbox.acceptUnprovenKernel) lets programs of strangers run on that kernel"
)
_CANARY_LIMITS = Limits(wall_time_s=10, cpu_time_s=10, memory_bytes=256 << 20, output_bytes=1 << 16, processes=8)


@dataclass(slots=True)
class PoolSize:
    """How many slots have a runner: enough for the demand of now and of the last `idle_s` seconds. Pure.

    `always` slots are kept beside those of the demand. A pool with `least` = `most` has a constant size.
    """

    least: int
    most: int
    spares: int
    idle_s: float
    always: int = 0
    # (since when, demand), falling: each ends where the next begins.
    _levels: deque[tuple[float, int]] = field(default_factory=deque, init=False)

    def observe(self, demand: int, now_s: float) -> None:
        """From `now_s` on, `demand` submissions wait or run."""
        since_s = now_s
        while self._levels and self._levels[-1][1] <= demand:
            since_s, _ = self._levels.pop()  # the level before still ends where the removed one began
        self._levels.append((since_s, demand))

    def wanted(self, now_s: float) -> tuple[int, int]:
        """The size from now on: slots with a runner, and runners that are kept ready beside them."""
        while len(self._levels) > 1 and self._levels[1][0] <= now_s - self.idle_s:
            self._levels.popleft()
        demand = self._levels[0][1] if self._levels else 0
        slots = min(self.most, max(self.least, demand))
        return self.always + slots, self.spares if slots else 0


def new_canary() -> tuple[str, bytes, bytes]:
    """A program by which a gateway tests a runner, its input and the output that it must print.

    It reports whether anything of an earlier submission is left: processes besides init, files besides its own. Names,
    numbers and order are new each time, so that a runner cannot keep the answer to a fixed text.
    """
    value, strangers, files, pid = (f"{secrets.choice(string.ascii_lowercase)}{secrets.token_hex(4)}" for _ in range(4))
    number, factor, more = (secrets.randbelow(1 << 30) for _ in range(3))
    lines = [
        f"{value} = int(input())",
        f'{strangers} = [{pid} for {pid} in os.listdir("/proc") if {pid}.isdigit() and int({pid}) not in (1, me)]',
        f'{files} = sorted(os.listdir("/tmp"))',
    ]
    secrets.SystemRandom().shuffle(lines)
    body = "\n".join(("import os", "me = os.getpid()", *lines))
    code = f"{body}\nprint({value} * {factor} + {more}, {strangers}, {files})\n"
    return code, b"%d\n" % number, f"{number * factor + more} [] ['main.py']\n".encode()


class GvisorSandbox(LocalSandbox):
    """The local backend's pool of slots, with runner pods as slots."""

    name = "gvisor"
    _keeps_compiled = False
    outer_layer = "gvisor:pod"
    _outside_runners: tuple[str, ...] = ("namespace:user", "separate-users", "cgroup:")  # layers of `local` alone

    def __init__(
        self,
        config: SandboxSection,
        source: Source | None = None,
        access: RunnerAccess | None = None,
        *,
        tool_slots: int = 0,
    ) -> None:
        """`source` and `access` are by default those of the runner pods. Raises SandboxUnavailable."""
        self._access = access or RunnerAccess(
            PoolKeys.of_file(Path(config.pool_key_file)), backend=self.name, refusal=self._refusal
        )
        slots, spares = config.slots or 1, config.pool_spares
        least = slots if config.pool_min < 0 else min(slots, config.pool_min)
        self._size = PoolSize(least, slots, spares, config.pool_idle_s, always=tool_slots)
        source = source or open_source(config, self._access.keys)
        is_sized = least < slots
        self.pool = RunnerPool(source, self._prove, slots + tool_slots, spares, is_sized_by_demand=is_sized)
        self._opening: dict[asyncio.Task[None], Slot] = {}
        self._parked: list[Slot] = []  # without a runner, because there is no work for them
        self._following: list[asyncio.Task[None]] = []
        self._on_slots: Callable[[], None] = lambda: None
        self._warned_s = -_WARN_EVERY_S
        self._demand_changed = asyncio.Event()
        super().__init__(config, tool_slots=tool_slots)

    async def start(self) -> None:
        """Return as soon as one slot has a runner; the other slots open when they get theirs.

        Raises SandboxUnavailable when no slot has one within `pool_start_s`.
        """
        try:
            await self.pool.start()
        except RunnersUnreachable as error:
            raise SandboxUnavailable(f"the {self.name} sandbox cannot start: {error}") from error
        self._open = True
        self._parked = self._slots[::-1]
        self._size.observe(1, time.monotonic())  # so that a gateway that can have no runner says so
        await self._resize()
        self._following.append(asyncio.create_task(self._follow_key(), name="key of the pool"))
        if self.pool.is_sized_by_demand:
            self._following.append(asyncio.create_task(self._follow_demand(), name="size of the pool"))
        try:
            async with asyncio.timeout(self._config.pool_start_s):
                while not self._free:
                    if self._opening:
                        await asyncio.wait(self._opening, timeout=_RETRY_S, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        await asyncio.sleep(_RETRY_S)
            self._size.observe(0, time.monotonic())
        except TimeoutError:
            await self.close()
            raise SandboxUnavailable(f"the {self.name} sandbox cannot start: {self.pool.last_problem}") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See `Sandbox`."""
        self._open = False
        tasks = [*self._opening, *self._following]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()
        languages.withdraw(self.pool)
        await self.pool.close()

    @property
    def isolation(self) -> tuple[str, ...]:
        """See `Sandbox`."""
        inner = (layer for layer in super().isolation if not layer.startswith(self._outside_runners))
        return (self.outer_layer, *inner, "separate-users")

    @property
    def use(self) -> BackendUse:
        """See `Sandbox`."""
        return BackendUse(
            runner_starts=(self.pool.num_starts, self.pool.start_s),
            runners={state.value: number for state, number in self.pool.states.items()},
            replacements={reason.value: number for reason, number in list(self.pool.replaced.items())},
        )

    def _refusal(self, facts: object) -> str:
        """See `RunnerAccess`."""
        if self._config.pool_accept_unproven_kernel or not (reason := why_not_gvisor(facts)):
            return ""
        return f"does not run on gVisor: {reason}; {_NOT_GVISOR}"

    def _make_slot(self, index: int) -> Slot:
        if index < self.num_slots:
            launch = PooledLaunch(self.pool, self._access, self._config)
            return Slot(index, self._config, launch, self._config.max_sessions)
        first = self._slots[index % self.num_slots]
        role = handshake.PARTNERS[index // self.num_slots - 1]
        return Slot(index, self._config, PartnerLaunch(first.launch, role, self._access, self._config))

    @property
    def usable_slots(self) -> int:
        """See `Sandbox`: the slots that have a runner."""
        return self.num_slots - len(self._opening) - len(self._parked)

    def watch_slots(self, changed: Callable[[], None]) -> None:
        """See `Sandbox`."""
        self._on_slots = changed

    def demand(self, submissions: int) -> None:
        """See `Sandbox`."""
        self._size.observe(submissions, time.monotonic())
        if self._parked:
            self._demand_changed.set()

    async def _follow_demand(self) -> None:
        while True:
            self._demand_changed.clear()
            await self._resize()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SIZE_CHECK_S):
                    await self._demand_changed.wait()

    async def _resize(self) -> None:
        """Open or park slots, so that as many as wanted have a runner. A slot in use stays as it is."""
        num_wanted, spares = self._size.wanted(time.monotonic())
        self.pool.resize(num_wanted, spares)
        while self._parked and self.num_slots - len(self._parked) < num_wanted:
            self._start_opening(self._parked.pop())
        surplus = max(0, self.num_slots - len(self._parked) - num_wanted)
        await asyncio.gather(*(self._park(slot) for slot in [*self._opening.values(), *self._free][:surplus]))

    async def _park(self, slot: Slot) -> None:
        opening = [task for task, opened in self._opening.items() if opened is slot]
        for task in opening:
            task.cancel()
        if slot in self._free:
            self._free.remove(slot)
        self._parked.append(slot)
        self._on_slots()
        await asyncio.gather(*opening, return_exceptions=True)
        with contextlib.suppress(RunnersUnreachable):  # then the pool finds the runner again, and ends it later
            await slot.stop()

    def _start_opening(self, slot: Slot) -> None:
        task = asyncio.create_task(self._open_slot(slot), name=f"opening slot {slot.index}")
        self._opening[task] = slot
        task.add_done_callback(self._end_opening)
        self._on_slots()

    def _end_opening(self, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)
        self._on_slots()

    async def _open_slot(self, slot: Slot) -> None:
        """Retry until the slot has a runner, then release the slot to the next session."""
        while True:
            try:
                await slot.ensure_usable()
            except Exception as error:  # an unexpected one too, which would lose the slot
                self._warn_of_empty_slots(error)
                await asyncio.sleep(_RETRY_S)
            else:
                self._release(slot)
                return

    def _warn_of_empty_slots(self, error: Exception) -> None:
        """One line for all slots, at most every `_WARN_EVERY_S`. Each unexpected error has a line with its trace."""
        is_expected = isinstance(error, SandboxError)
        if is_expected and time.monotonic() < self._warned_s + _WARN_EVERY_S:
            return
        self._warned_s = time.monotonic()
        about = {"slots": len(self._opening), "detail": str(error)}
        log.warning("slots have no runner yet", extra=about, exc_info=not is_expected)

    async def _follow_key(self) -> None:
        """Replace the runners with an earlier key, each between two submissions."""
        keys = self._access.keys
        while True:
            await asyncio.sleep(_KEY_CHECK_S)
            keys.reload()
            keys.forget_all_but(frozenset(self.pool.names))
            for runner in self.pool.to_outdate(keys.is_outdated):
                with contextlib.suppress(RunnersUnreachable):
                    await self.pool.outdate(runner)
            # The slots that have these runners give them back: now, or after the submission.
            outdated = {one.name for one in self.pool.usable if one.is_outdated}
            for slot in self._slots:
                if runner_of(slot) in outdated:
                    slot.retire()
                    if slot in self._free:
                        self._free.remove(slot)
                        self._start_opening(slot)

    async def _restart(self, slot: Slot) -> None:
        await slot.stop()
        if self._open:
            self._start_opening(slot)

    async def _prove(self, runner: Runner) -> bool:
        """Run the canary in a runner. Raises SandboxError, OSError."""
        slot = Slot(-1, self._config, RunnerLaunch(self._access, self._config, runner))
        code, given, expected = new_canary()
        program = Program(languages.registry()["python"], code, _CANARY_LIMITS)
        try:
            await slot.ensure_usable()
            session = SlotSession(slot, program, self._config)
            session.begin()
            await session.compile()
            result = await session.run(given)
        finally:
            await slot.stop()
        if (result.exit, result.stdout) != (Exit.EXITED, expected):
            log.error("a canary gave a wrong result", extra={"runner": runner.name, "result": str(result)[:500]})
            return False
        return True


class UsernsSandbox(GvisorSandbox):
    """The same pool. A runner's kernel is that of its node, and none of its users is one of the node's."""

    name = "userns"
    outer_layer = "userns:pod"
    _outside_runners = ("separate-users", "cgroup:")

    def _refusal(self, facts: object) -> str:
        """See `RunnerAccess`."""
        if not (reason := why_not_userns(facts)):
            return ""
        return f"has no users of its own: {reason}; its pod needs hostUsers: false, which its node must support"


def open_source(config: SandboxSection, keys: PoolKeys) -> Source:
    """The source of runners that the configuration names. Raises SandboxUnavailable."""
    if not config.pool_managed:
        return HeadlessRunners(config.pool_service, config.pool_port, keys)
    try:
        from nouscoder.verifier.sandbox.runners.kubernetes_pods import ManagedPods, read_template
        from nouscoder.verifier.sandbox.runners.sandbox_claims import ClaimedSandboxes
    except ImportError as error:
        raise SandboxUnavailable(
            f"the {config.backend} sandbox needs the Python package kubernetes: {how_to_install('cluster')}"
        ) from error
    template = Path(config.pool_template)
    made_by = ClaimedSandboxes if read_template(template)["kind"] == "SandboxClaim" else ManagedPods
    return made_by(template, config.pool_port)


class HeadlessRunners(Source):
    """Runners of a Deployment, found by the DNS name of their headless service: see `Source`.

    A worn runner gets a request to exit; the kubelet then restarts its container. Several gateways may find the same
    runners. A runner serves one gateway at a time and refuses the others as busy.
    """

    def __init__(self, service: str, port: int, keys: PoolKeys) -> None:
        self._service = service
        self._port = port
        self._keys = keys
        self._quarantined: set[str] = set()

    async def start(self, on_change: Callable[[], None]) -> None:
        """See `Source`. DNS reports no changes, so `on_change` is never called."""

    async def list(self) -> Sequence[FoundRunner]:
        """See `Source`. Every address of the name is a ready runner."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_RESOLVE_LIMIT_S):
                answers = await loop.getaddrinfo(self._service, self._port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            raise RunnersUnreachable(f"{self._service} does not resolve: {error!r}") from error
        hosts = sorted({str(address[0]) for *_, address in answers})
        return [FoundRunner(host, (host, self._port)) for host in hosts if host not in self._quarantined]

    async def remove(self, runner: FoundRunner) -> None:
        """See `Source`."""
        if runner.address is None:
            return
        try:
            retire, limit_s = handshake.RETIRE, handshake.LIMIT_S
            link = await connect_by_any(runner.address, self._keys, retire, {}, name=runner.name, limit_s=limit_s)
            link.writer.transport.abort()
        except (SandboxError, OSError, TimeoutError):
            return  # it has exited, or the next canary will get no answer

    async def quarantine(self, runner: FoundRunner) -> None:
        """See `Source`. This gateway never uses the runner again."""
        self._quarantined.add(runner.name)

    async def close(self) -> None:
        """See `Source`. Does nothing, because the Deployment owns the runners."""
