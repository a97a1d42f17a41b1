"""A pool that grows with its queue, keeps warm spares while there is work, and shrinks to nothing when there is none.

The runners are real agents with real harnesses, as processes here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.modal_server import make_home
from tests.services.test_pool_key_rotation import Agents
from tests.services.test_runner_pool import Canaries, Pods

from nouscoder.config import ConfigError, SandboxSection, load_config
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable, SpillOverSandbox
from nouscoder.verifier.sandbox.runners import pods as pods_module
from nouscoder.verifier.sandbox.runners import pool as pool_module
from nouscoder.verifier.sandbox.runners.pods import GvisorSandbox, PoolSize
from nouscoder.verifier.sandbox.runners.pool import RunnerPool, RunnerState
from nouscoder.verifier.sandbox.slot import Slot

SUBMISSION = Submission(StdinTests((StdinCase("", "truth"),)), "print('truth')", limits=Limits(60.0, 60.0))
IDLE_S = 1.0

seconds = st.floats(0, 50)


@given(st.lists(st.tuples(seconds, st.integers(0, 20)), max_size=30), st.integers(0, 4), st.integers(0, 3), seconds)
def test_the_size_is_the_highest_demand_of_the_last_seconds_within_its_bounds(
    changes: list[tuple[float, int]], least: int, spares: int, later_s: float
) -> None:
    """Compared with the maximum over all levels of demand that were in force in the window."""
    size, now_s, levels = PoolSize(least, 10, spares, 30.0), 0.0, [(0.0, 0)]
    size.observe(0, 0.0)
    for pause_s, demand in changes:
        now_s += pause_s
        size.observe(demand, now_s)
        levels.append((now_s, demand))
        assert size.wanted(now_s)[0] >= min(10, demand)
    now_s += later_s
    ends = [since_s for since_s, _ in levels[1:]] + [now_s + 1]
    seen = [demand for (_, demand), end_s in zip(levels, ends, strict=True) if end_s > now_s - 30.0]
    slots = min(10, max(least, *seen))
    assert size.wanted(now_s) == (slots, spares if slots else 0)


@given(st.lists(st.integers(0, 20), max_size=10), st.integers(0, 3))
def test_a_pool_without_work_becomes_its_least_size_and_nothing_else_keeps_it(demands: list[int], tools: int) -> None:
    size = PoolSize(0, 10, 2, 30.0, always=tools)
    for at_s, demand in enumerate(demands):
        size.observe(demand, float(at_s))
    size.observe(0, 100.0)
    assert size.wanted(130.0) == (tools, 0)
    constant = PoolSize(4, 4, 2, 30.0)
    constant.observe(0, 0.0)
    assert constant.wanted(0.0) == constant.wanted(1000.0) == (4, 2)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_sized", [True, False])
async def test_runners_beyond_the_size_are_ended_unless_a_slot_has_them_or_others_may_use_them(
    is_sized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_CHECK_INTERVAL_S", 0.01)
    pods = Pods()
    pool = RunnerPool(pods, Canaries(), size=3, spares=1, is_sized_by_demand=is_sized)
    await pool.start()
    held = [await pool.lend(5), await pool.lend(5)]
    await until(lambda: pool.states[RunnerState.READY] == 2)
    pool.resize(1, 0)
    if is_sized:
        await until(lambda: len(pods.there) == 2)
    await asyncio.sleep(0.05)
    assert {runner.name for runner in held} <= set(pods.there)
    assert len(pods.there) == (2 if is_sized else 4)
    await pool.give_back(held[0], worn=False)
    assert (held[0].name in pods.there) == (not is_sized)
    pool.resize(3, 1)
    await until(lambda: pool.states[RunnerState.READY] == 3)
    assert not pool.replaced, "nothing was replaced"
    await pool.close()


@asynccontextmanager
async def opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, least: int, slots: int, spares: int
) -> AsyncIterator[tuple[Grader, GvisorSandbox, Agents]]:
    make_home(folder)
    monkeypatch.setattr(pods_module, "_SIZE_CHECK_S", 0.05)
    monkeypatch.setattr(pool_module, "_CHECK_INTERVAL_S", 0.05)
    agents = Agents(folder)
    monkeypatch.setattr(pods_module, "open_source", lambda config, keys: agents)
    for name in ("secret", "key"):
        (folder / name).write_text("a key of the pool, long enough")
    config = SandboxSection(
        backend="gvisor",
        slots=slots,
        pool_key_file=str(folder / "key"),
        pool_spares=spares,
        pool_min=-1 if least is None else least,
        pool_idle_s=IDLE_S,
        pool_start_s=120,
        pool_accept_unproven_kernel=True,
    )
    sandbox = GvisorSandbox(config)
    whole = SpillOverSandbox([sandbox], 1.0)
    try:
        await whole.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    grader = Grader(whole, VerifierMetrics(CollectorRegistry()))
    grader.follow(whole)
    yield grader, sandbox, agents
    await whole.close()
    assert not agents.processes


async def grade(grader: Grader, number: int) -> Counter[VerdictKind]:
    return Counter(verdict.kind for verdict in await asyncio.gather(*(grader.grade(SUBMISSION) for _ in range(number))))


async def test_from_zero_through_a_burst_and_back_without_a_lost_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, monkeypatch, least=0, slots=3, spares=1) as (grader, sandbox, agents):
        await until(lambda: not agents.processes)
        assert sandbox.usable_slots == 0
        made = agents.num_made
        assert await grade(grader, 1) == {VerdictKind.ACCEPTED: 1}
        assert agents.num_made - made <= 2, "one submission: one slot, and one spare"
        assert await grade(grader, 30) == {VerdictKind.ACCEPTED: 30}
        assert agents.num_made - made <= 4
        assert sandbox.pool.size == 3
        await until(lambda: not agents.processes)
        assert sandbox.usable_slots == 0
        assert not sandbox.use.replacements


async def test_a_waiting_submission_gets_the_warm_spare_and_an_idle_pool_keeps_its_least_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second submission is graded while no runner can be made."""
    async with opened(tmp_path, monkeypatch, least=1, slots=2, spares=1) as (grader, sandbox, agents):
        await until(lambda: sandbox.pool.states[RunnerState.READY] == 1)
        made = agents.num_made
        create = agents.create
        monkeypatch.setattr(agents, "create", lambda: asyncio.Event().wait())
        slow = Submission(StdinTests((StdinCase("", ""),)), "import time; time.sleep(50)", limits=Limits(60.0, 60.0))
        first = asyncio.create_task(grader.grade(slow))
        await until(lambda: grader.unfinished == 1)
        assert await grade(grader, 1) == {VerdictKind.ACCEPTED: 1}
        assert not first.done()
        assert agents.num_made == made
        monkeypatch.setattr(agents, "create", create)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: (len(agents.processes), sandbox.usable_slots) == (2, 1))
        assert (sandbox.pool.size, sandbox.pool.spares) == (1, 1)


@pytest.mark.parametrize(
    "settings",
    [
        ("verifier.sandbox.backend=local", "verifier.sandbox.pool_min=0"),
        ("verifier.sandbox.backend=gvisor", "verifier.sandbox.pool_managed=false", "verifier.sandbox.pool_min=0"),
        ("verifier.sandbox.backend=gvisor", "verifier.sandbox.pool_idle_s=0"),
    ],
)
def test_a_size_by_demand_is_refused_where_the_gateway_makes_no_runners(settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="pool_"):
        load_config(None, settings)


async def test_a_slot_is_not_lost_when_it_opens_with_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError("too many open files"), RuntimeError("a defect")]
    ensure_usable = Slot.ensure_usable

    async def fail_first(slot: Slot) -> None:
        if slot.index == 0 and errors:
            raise errors.pop()
        await ensure_usable(slot)

    monkeypatch.setattr(Slot, "ensure_usable", fail_first)
    monkeypatch.setattr(pods_module, "_RETRY_S", 0.01)
    async with opened(tmp_path, monkeypatch, least=1, slots=1, spares=0) as (grader, sandbox, _):
        assert not errors
        assert sandbox.usable_slots == 1
        assert await grade(grader, 1) == {VerdictKind.ACCEPTED: 1}


async def test_a_start_waits_while_no_slot_opens_and_then_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_home(tmp_path)
    (tmp_path / "key").write_text("a key of the pool, long enough")
    config = SandboxSection(
        backend="gvisor",
        slots=1,
        pool_key_file=str(tmp_path / "key"),
        pool_start_s=0.3,
        pool_accept_unproven_kernel=True,
    )
    sandbox = GvisorSandbox(config, Pods())

    def open_none(slot: Slot) -> None:
        """The slot ends its opening at once, as one that was parked does."""

    monkeypatch.setattr(sandbox, "_start_opening", open_none)
    with pytest.raises(SandboxUnavailable, match="the gvisor sandbox cannot start"):
        await sandbox.start()


async def test_slots_without_a_runner_are_logged_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_home(tmp_path)
    (tmp_path / "key").write_text("a key of the pool, long enough")
    config = SandboxSection(
        backend="gvisor",
        slots=50,
        pool_key_file=str(tmp_path / "key"),
        pool_start_s=60,
        pool_accept_unproven_kernel=True,
    )
    sandbox = GvisorSandbox(config, Pods())
    tries, enough = 0, asyncio.Event()

    async def no_runner(slot: Slot) -> None:
        nonlocal tries
        tries += 1
        if tries > 200:
            enough.set()
        raise SandboxUnavailable("no runner is ready")

    monkeypatch.setattr(Slot, "ensure_usable", no_runner)
    monkeypatch.setattr(pods_module, "_RETRY_S", 0.001)
    starting = asyncio.create_task(sandbox.start())
    async with asyncio.timeout(60):
        await enough.wait()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    told = [record for record in caplog.records if record.message == "slots have no runner yet"]
    assert [vars(record)["slots"] for record in told] == [50]
