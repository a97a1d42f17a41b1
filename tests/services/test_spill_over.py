"""Spill-over: the first backend is preferred, the next one takes what is too old, and each has its own account."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.config import SandboxSection, SpillOverSection, VerifierSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import (
    Program,
    SandboxError,
    SandboxUnavailable,
    open_backends,
    open_sandbox,
)
from nouscoder.verifier.sandbox.base import BackendUse
from nouscoder.verifier.sandbox.fake import FakeSandbox
from nouscoder.verifier.sandbox.spill_over import SpillOverSandbox, next_change_s, place
from nouscoder.verifier.toolchains import languages
from nouscoder.verifier.toolchains.languages import registry

PROGRAM = Program(registry()["python"], "print(1)", Limits())
LIMITS = Limits(wall_time_s=60, cpu_time_s=30, memory_bytes=256 << 20, output_bytes=1 << 20, processes=64)
AFTER_S = 3600.0  # so long that no test reaches it by waiting

ages = st.floats(0, 1000)
frees = st.lists(st.integers(-2, 3), min_size=1, max_size=4)


@given(ages, st.floats(0, 100), frees)
def test_the_first_free_backend_for_which_it_is_old_enough(age_s: float, after_s: float, free: list[int]) -> None:
    index = place(age_s, after_s, free)
    allowed = [k for k, slots in enumerate(free) if slots > 0 and age_s >= k * after_s]
    assert index == (allowed[0] if allowed else None)
    change_s = next_change_s(age_s, after_s, free)
    if index is not None:
        assert change_s == 0.0
    elif change_s is not None:
        assert place(age_s + change_s + 1e-6 * (1 + age_s), after_s, free) is not None
    else:
        assert max(free) <= 0


class Elastic(FakeSandbox):
    """A fake whose usable slots the test sets."""

    name = "elastic"
    use = BackendUse(dollars=0.5)
    usable_slots = 0

    def __init__(self, usable_slots: int) -> None:
        super().__init__(num_slots=4)
        self.usable_slots = usable_slots
        self._changed: Callable[[], None] = lambda: None
        self.demands: list[int] = []

    def demand(self, submissions: int) -> None:
        self.demands.append(submissions)

    def watch_slots(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def grow(self, usable_slots: int) -> None:
        self.usable_slots = usable_slots
        self._changed()


class Held:
    """Sessions that stay open until the test ends them."""

    def __init__(self, sandbox: SpillOverSandbox) -> None:
        self._sandbox = sandbox
        self.ends: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self, since_s: float | None = None) -> asyncio.Task[None]:
        end = asyncio.Event()
        self.ends.append(end)
        task = asyncio.create_task(self._hold(Program(PROGRAM.language, "print(1)", Limits(), since_s=since_s), end))
        self.tasks.append(task)
        for _ in range(10):
            await asyncio.sleep(0)
        return task

    async def _hold(self, program: Program, end: asyncio.Event) -> None:
        async with self._sandbox.session(program):
            await end.wait()

    async def end(self, index: int) -> None:
        self.ends[index].set()
        await self.tasks[index]
        for _ in range(10):
            await asyncio.sleep(0)


@asynccontextmanager
async def opened(after_s: float = AFTER_S, usable: int = 4) -> AsyncIterator[tuple[SpillOverSandbox, Held, Elastic]]:
    elastic = Elastic(usable)
    sandbox = SpillOverSandbox([FakeSandbox(num_slots=2), elastic], after_s)
    await sandbox.start()
    held = Held(sandbox)
    yield sandbox, held, elastic
    for task in held.tasks:
        task.cancel()
    await asyncio.gather(*held.tasks, return_exceptions=True)
    assert [backend.in_use for backend in sandbox.backends] == [0, 0]
    await sandbox.close()


def in_use(sandbox: SpillOverSandbox) -> list[int]:
    return [backend.in_use for backend in sandbox.backends]


async def test_the_first_backend_serves_as_long_as_it_has_slots() -> None:
    async with opened() as (sandbox, held, _):
        for _ in range(4):
            await held.open()
        assert in_use(sandbox) == [2, 0]
        await held.end(0)
        assert in_use(sandbox) == [2, 0]


async def test_an_old_session_goes_to_the_next_backend_only_when_the_first_is_full() -> None:
    async with opened() as (sandbox, held, _):
        for _ in range(2):
            await held.open(since_s=-1e9)
        assert in_use(sandbox) == [2, 0]
        await held.open(since_s=-1e9)
        await held.open()  # young: it waits for the first
        assert in_use(sandbox) == [2, 1]


async def test_the_oldest_waiting_session_gets_the_first_free_slot() -> None:
    async with opened(usable=0) as (sandbox, held, elastic):
        for _ in range(2):
            await held.open()
        young, old = await held.open(), await held.open(since_s=-1e9)
        elastic.grow(1)  # the old one takes it, although it came later
        await asyncio.sleep(0)
        assert in_use(sandbox) == [2, 1]
        await held.end(3)
        assert old.done()
        assert not young.done()


async def test_a_session_becomes_old_while_it_waits() -> None:
    async with opened(after_s=0.05) as (sandbox, held, _):
        for _ in range(3):
            await held.open()
        async with asyncio.timeout(60):
            while in_use(sandbox) == [2, 0]:
                await asyncio.sleep(0.01)
        assert in_use(sandbox) == [2, 1]
        assert not any(task.done() for task in held.tasks), "each holds its slot"


async def test_slots_that_cannot_be_used_are_not_used() -> None:
    async with opened(usable=1) as (sandbox, held, elastic):
        for _ in range(4):
            await held.open(since_s=-1e9)
        assert in_use(sandbox) == [2, 1]
        elastic.grow(4)
        await asyncio.sleep(0)
        assert in_use(sandbox) == [2, 2]
        assert sandbox.usable_slots == 6


async def test_each_backend_has_its_own_account() -> None:
    async with opened() as (sandbox, held, _):
        for _ in range(3):
            await held.open(since_s=-1e9)
        for index in range(3):
            await held.end(index)
        fake, elastic = sandbox.uses["fake"], sandbox.uses["elastic"]
        assert (fake.submissions, elastic.submissions) == (2, 1)
        assert (fake.dollars, elastic.dollars) == (0.0, 0.5)
        assert elastic.seconds > 0


async def test_a_cancelled_waiter_leaves_the_others_their_turn() -> None:
    async with opened(usable=0) as (sandbox, held, _):
        for _ in range(4):
            await held.open()
        held.tasks[2].cancel()
        await held.end(0)
        assert in_use(sandbox) == [2, 0]
        assert not held.tasks[3].done()


class Broken(FakeSandbox):
    """A backend that does not start."""

    name = "broken"

    async def start(self) -> None:
        raise SandboxUnavailable("it is not there")


async def test_a_backend_that_does_not_start_stops_the_service_with_its_own_sentence() -> None:
    first = FakeSandbox()
    with pytest.raises(SandboxUnavailable, match="it is not there"):
        await SpillOverSandbox([first, Broken()], 1.0).start()


def test_the_configuration_names_both_backends_and_refuses_the_same_twice() -> None:
    spill_over = SpillOverSection(backend="local", slots=3, after_s=1.0)
    sandbox = open_backends(
        VerifierSection(sandbox=SandboxSection(backend="fake", slots=2, spill_over=spill_over), libraries=())
    )
    assert (sandbox.name, sandbox.num_slots) == ("fake+local", 5)
    with pytest.raises(ValueError, match=r"spill_over\.backend"):
        SandboxSection(backend="local", spill_over=spill_over)


async def test_a_language_that_a_remote_host_offers_too_runs_with_the_tools_of_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The TypeScript compiler is found by its path alone, so a name in its place was the candidate's compile error."""
    remote = object()
    sandbox = open_sandbox(SandboxSection(slots=1))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    here = languages.installed()
    code = {"c": "int main(void) { return 3; }", "typescript": "const n: number = 3;\nprocess.exit(n)"}
    languages.offer(remote, languages.all_tools())
    try:
        both = languages.installed()
        assert both.keys() == languages.registry().keys() >= here.keys() >= {"c"}
        for name in sorted(code.keys() & here.keys()):
            assert not any(map(os.path.isabs, both[name].detect))
            async with sandbox.session(Program(both[name], code[name], LIMITS)) as session:
                assert (await session.run(b"")).exit_code == 3
        monkeypatch.setattr(languages, "_own_tools", dict)
        with pytest.raises(SandboxError, match="c needs sh, gcc"):
            async with sandbox.session(Program(both["c"], code["c"], LIMITS)):
                pass
    finally:
        languages.withdraw(remote)
        await sandbox.close()
    assert languages.installed() == here
