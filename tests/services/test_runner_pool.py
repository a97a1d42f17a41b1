"""The pool of runners: each is lent to one slot at a time after a canary, and replaced when worn, lost or faulty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from nouscoder.verifier.sandbox import SandboxError
from nouscoder.verifier.sandbox.runners import pool as pool_module
from nouscoder.verifier.sandbox.runners.link import KernelUnproven
from nouscoder.verifier.sandbox.runners.pool import (
    FoundRunner,
    Replaced,
    Runner,
    RunnerPool,
    RunnerState,
    RunnersUnreachable,
)


class Pods:
    """A source in memory. Its runners are ready at once, unless `slow`."""

    def __init__(self) -> None:
        self.there: dict[str, FoundRunner] = {}
        self.quarantined: list[str] = []
        self.num_made = 0
        self.is_slow = False
        self.is_away = False

    async def start(self, on_change: Callable[[], None]) -> None:
        """Report no changes, because the pool checks often enough."""

    async def list(self) -> Sequence[FoundRunner]:
        if self.is_away:
            raise RunnersUnreachable("the API is away")
        return list(self.there.values())

    async def create(self) -> str | None:
        self.num_made += 1
        name = f"pod-{self.num_made}"
        self.there[name] = FoundRunner(name, None if self.is_slow else ("10.0.0.1", self.num_made))
        return name

    async def remove(self, runner: FoundRunner) -> None:
        self.there.pop(runner.name, None)

    async def quarantine(self, runner: FoundRunner) -> None:
        self.there.pop(runner.name, None)
        self.quarantined.append(runner.name)

    async def lacked_memory(self, runner: FoundRunner) -> bool:
        return False

    async def close(self) -> None:
        self.there.clear()


class Canaries:
    """Gives scripted results for each runner, and counts the calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.wrong: set[str] = set()
        self.silent: set[str] = set()
        self.unproven: set[str] = set()

    async def __call__(self, runner: Runner) -> bool:
        assert runner.state is RunnerState.UNPROVEN, "no slot may have it during its canary"
        self.asked.append(runner.name)
        await asyncio.sleep(0)
        if runner.name in self.unproven:
            raise KernelUnproven(f"{runner.name} runs on Linux")
        if runner.name in self.silent:
            raise ConnectionRefusedError(runner.name)
        return runner.name not in self.wrong


@pytest.fixture
def pods() -> Pods:
    return Pods()


@pytest.fixture
def canaries() -> Canaries:
    return Canaries()


@pytest.fixture
async def pool(pods: Pods, canaries: Canaries, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunnerPool]:
    monkeypatch.setattr(pool_module, "_CHECK_INTERVAL_S", 0.01)
    made = RunnerPool(pods, canaries, size=2)
    await made.start()
    yield made
    await made.close()
    assert not pods.there


async def test_a_runner_is_lent_to_one_at_a_time_and_only_after_a_canary(pool: RunnerPool, canaries: Canaries) -> None:
    one, other = await pool.lend(1), await pool.lend(1)
    assert one.name != other.name
    assert {one.name, other.name} <= set(canaries.asked)
    with pytest.raises(SandboxError, match="no runner was free"):
        await pool.lend(0.05)
    before = canaries.asked.count(one.name)
    await pool.give_back(one, worn=False)
    assert (await pool.lend(1)) is one
    assert canaries.asked.count(one.name) == before + 1


async def test_requests_for_runners_are_served_in_order(pool: RunnerPool) -> None:
    held = [await pool.lend(1), await pool.lend(1)]
    order: list[int] = []

    async def ask(number: int) -> None:
        await pool.lend(1)
        order.append(number)

    tasks = [asyncio.create_task(ask(number)) for number in range(2)]
    await asyncio.sleep(0)
    for runner in held:
        await pool.give_back(runner, worn=False)
    await asyncio.gather(*tasks)
    assert order == [0, 1]


async def test_a_cancelled_waiter_gets_no_runner(pool: RunnerPool) -> None:
    held = [await pool.lend(1), await pool.lend(1)]
    waiting = asyncio.create_task(pool.lend(5))
    await asyncio.sleep(0)
    waiting.cancel()
    await pool.give_back(held[0], worn=False)
    assert (await pool.lend(1)) is held[0]
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_runner_assigned_to_a_cancelled_waiter_is_not_lost(pool: RunnerPool) -> None:
    held = [await pool.lend(1), await pool.lend(1)]
    waiting = asyncio.create_task(pool.lend(5))
    await asyncio.sleep(0)
    pool._offer(held[0])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await pool.lend(1)) is held[0]


async def test_an_idle_runner_is_proved_again_and_stays_in_the_pool(
    pool: RunnerPool, canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle runner ends itself when no gateway comes for long."""
    held = await pool.lend(5)
    monkeypatch.setattr(pool_module, "_RECHECK_AFTER_S", 0.0)
    async with asyncio.timeout(60):
        while len(canaries.asked) < 6:
            await asyncio.sleep(0.01)
    assert canaries.asked.count(held.name) == 1, "one that is lent is left alone"
    assert (await pool.lend(5)).name != held.name
    assert not pool.replaced


async def test_a_worn_runner_is_replaced(pool: RunnerPool, pods: Pods) -> None:
    worn = await pool.lend(1)
    await pool.give_back(worn, worn=True)
    assert worn.name not in pods.there
    assert {(await pool.lend(1)).name, (await pool.lend(1)).name}.isdisjoint({worn.name})
    assert pool.replaced == {Replaced.WORN: 1}


async def test_a_runner_that_fails_its_canary_is_quarantined_and_never_lent(
    pool: RunnerPool, pods: Pods, canaries: Canaries
) -> None:
    canaries.wrong = {"pod-1"}
    names = {(await pool.lend(1)).name, (await pool.lend(1)).name}
    assert names == {"pod-2", "pod-3"}
    assert pods.quarantined == ["pod-1"]
    assert pool.states[RunnerState.QUARANTINED] == 1
    assert pool.replaced == {Replaced.CANARY: 1}


async def test_a_silent_runner_is_replaced_after_three_tries(pool: RunnerPool, canaries: Canaries) -> None:
    canaries.silent = {"pod-2"}
    names = {(await pool.lend(1)).name, (await pool.lend(1)).name}
    assert names == {"pod-1", "pod-3"}
    assert canaries.asked.count("pod-2") == 3
    assert pool.replaced == {Replaced.SILENT: 1}


async def test_a_lost_runner_is_replaced_and_ignored_when_it_is_given_back(pool: RunnerPool, pods: Pods) -> None:
    lost, kept = await pool.lend(1), await pool.lend(1)
    await pods.remove(lost.found)
    fresh = await pool.lend(1)
    await pool.give_back(lost, worn=False)
    assert {runner.name for runner in (kept, fresh)} == set(pods.there)
    assert pool.replaced == {Replaced.LOST: 1}


async def test_an_unreachable_api_is_retried_and_named_in_errors(pool: RunnerPool, pods: Pods) -> None:
    held = [await pool.lend(1), await pool.lend(1)]
    pods.is_away = True
    await pool.give_back(held[0], worn=False)
    assert (await pool.lend(1)) is held[0], "existing runners are still used"
    with pytest.raises(SandboxError, match="the API is away"):
        await pool.lend(0.1)
    pods.is_away = False
    await pool.give_back(held[1], worn=True)
    assert (await pool.lend(1)).name == "pod-3"


async def test_a_runner_that_does_not_start_is_replaced(
    pool: RunnerPool, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_STUCK_AFTER_S", 0.1)
    held = [await pool.lend(1), await pool.lend(1)]
    pods.is_slow = True
    await pool.give_back(held[0], worn=True)
    with pytest.raises(SandboxError, match="did not start within"):
        await pool.lend(0.5)
    pods.is_slow = False
    assert (await pool.lend(5)).name not in {runner.name for runner in held}
    assert pool.replaced[Replaced.STUCK] >= 1


async def test_what_a_starting_runner_waits_for_is_said_to_those_who_get_none(pool: RunnerPool, pods: Pods) -> None:
    worn, _ = await pool.lend(1), await pool.lend(1)
    pods.is_slow = True
    await pool.give_back(worn, worn=True)
    async with asyncio.timeout(60):
        while "pod-3" not in pods.there:
            await asyncio.sleep(0.01)
        pods.there["pod-3"] = FoundRunner("pod-3", None, waits_for="there is no such pool")
        while "no such pool" not in pool.last_problem:
            await asyncio.sleep(0.01)
    with pytest.raises(SandboxError, match="runner pod-3 has not started: there is no such pool"):
        await pool.lend(0.05)


async def test_the_time_from_creation_to_the_first_answer_is_counted(pods: Pods, pool: RunnerPool) -> None:
    held = [await pool.lend(1), await pool.lend(1)]
    fast, before_s = pool.num_starts, pool.start_s
    assert (fast, before_s >= 0) == (2, True)
    pods.is_slow = True
    await pool.give_back(held[0], worn=True)
    while pool.states[RunnerState.STARTING] != 1:
        await asyncio.sleep(0)
    (slow,) = [name for name, pod in pods.there.items() if pod.address is None]
    assert pool.num_starts == fast
    pods.there[slow] = FoundRunner(slow, ("10.0.0.1", 9))
    await pool.lend(60)
    assert pool.num_starts == fast + 1
    assert pool.start_s > before_s


async def test_a_runner_on_another_kernel_is_never_lent_and_is_replaced_after_a_pause(
    pods: Pods, canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replacement is another pod, so the pool makes one only now and then."""
    monkeypatch.setattr(pool_module, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(pool_module, "_WRONG_KERNEL_PAUSE_S", 0.2)
    canaries.unproven = {"pod-1", "pod-2", "pod-3"}
    pool = RunnerPool(pods, canaries, size=1)
    await pool.start()
    try:
        with pytest.raises(SandboxError, match="pod-1 runs on Linux"):
            await pool.lend(0.1)
        assert pods.num_made == 1
        assert (await pool.lend(60)).name == "pod-4"
        assert pool.replaced == {Replaced.KERNEL: 3}
    finally:
        await pool.close()


async def test_a_runner_is_lent_while_others_of_a_large_pool_are_still_to_be_made(
    pods: Pods, canaries: Canaries
) -> None:
    made, blocked = pods.create, asyncio.Event()

    async def create() -> str | None:
        if pods.num_made == 50:
            await blocked.wait()
        return await made()

    pods.create = create  # type: ignore[method-assign]
    pool = RunnerPool(pods, canaries, size=100)
    await pool.start()
    try:
        assert (await pool.lend(60)).name in pods.there
        assert pods.num_made <= 50
        blocked.set()
        async with asyncio.timeout(60):
            while sum(pool.states.values()) < 100:
                await asyncio.sleep(0.01)
    finally:
        await pool.close()
    assert pods.num_made == 100


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_source_that_makes_no_runner_is_not_asked_at_once_again(
    pods: Pods, canaries: Canaries, refuses: bool
) -> None:
    asked: list[int] = []

    async def create() -> str | None:
        asked.append(1)
        if refuses:
            raise RunnersUnreachable("no")
        return None

    pods.create = create  # type: ignore[method-assign]
    pool = RunnerPool(pods, canaries, size=100)
    await pool.start()
    async with asyncio.timeout(60):
        while not asked:
            await asyncio.sleep(0)
    assert not pool._changed.is_set(), "it waits for a change, or for its interval"
    await pool.close()
    assert asked == [1]


def test_the_states_are_counted_while_another_thread_adds_a_runner(pods: Pods, canaries: Canaries) -> None:
    """The thread of the metrics counts them."""
    pool = RunnerPool(pods, canaries, size=1)

    class Counted(Runner):
        @property
        def state(self) -> RunnerState:
            pool._runners[str(len(pool._runners))] = runner
            return RunnerState.READY

        @state.setter
        def state(self, _: RunnerState) -> None: ...

    runner = Counted("one", None, RunnerState.READY, 0.0)
    pool._runners["one"] = runner
    assert pool.states[RunnerState.READY] == 1
