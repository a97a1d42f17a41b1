"""No live lease is taken back because the sweeper, Redis or a clock was away; a dead worker's lease always is."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.services.test_broker_restart import ended, free_address, start_broker_process

from nouscoder.broker import store as store_module
from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerUnavailable
from nouscoder.broker.sweeper import Sweeper
from nouscoder.data.problems import save_problems
from nouscoder.rpc.broker_client import BrokerClient

GEN, DEAD = "generation-h-0-1", "generation-h-1-1"
LEASE_S = 10.0


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """A run with one live worker, which beats three times a lease while all is well, and one dead one."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.clock = Clock()
        self.sweeper = Sweeper(broker.store, LEASE_S, self.clock)
        self._last_beat_s = 0.0

    async def begin(self, rig: Any) -> None:
        await self.broker.publish_policy(rig.manifest(0))
        self.live = [item.lease.lease_id for item in (await self.broker.lease_tasks(GEN, 8, 0)).tasks]
        await self.broker.lease_tasks(DEAD, 8, 0)

    async def pass_s(self, duration_s: float, *, sweeps: bool = True) -> None:
        """Time passes; without `sweeps` nobody can beat or sweep meanwhile."""
        end = self.clock.now_s + duration_s
        while self.clock.now_s < end - 1e-9:
            self.clock.now_s += self.sweeper.period_s
            if not sweeps:
                continue
            if self.clock.now_s - self._last_beat_s >= LEASE_S / 3:
                assert await self.broker.heartbeat(GEN, self.live) == {}, "a live lease was taken back"
                self._last_beat_s = self.clock.now_s
            await self.sweeper.sweep()


@pytest.fixture
async def swept(new_broker: Callable[..., Broker], broker_rig: Any) -> Rig:
    rig = Rig(new_broker(f"broker.lease_s={LEASE_S}"))
    await rig.begin(broker_rig)
    return rig


async def in_flight(broker: Broker) -> tuple[int, int]:
    """Rollouts that are leased, and that wait again."""
    states = (await broker.status()).ledger.in_flight
    return states["sampling"], states["queued"]


async def test_a_dead_workers_leases_are_taken_back_and_a_live_ones_are_not(swept: Rig) -> None:
    await swept.pass_s(3 * LEASE_S)
    assert await in_flight(swept.broker) == (8, 8)


@pytest.mark.parametrize("away_s", [8.0, 12.0, 3600.0])
async def test_a_broker_that_was_stopped_takes_no_live_lease_back(swept: Rig, away_s: float) -> None:
    await swept.pass_s(2 * LEASE_S - 2)
    await swept.pass_s(away_s, sweeps=False)
    # The holders learn that the broker is back only a while later.
    await swept.sweeper.sweep()
    swept._last_beat_s = swept.clock.now_s
    await swept.pass_s(2 * LEASE_S)
    assert await in_flight(swept.broker) == (8, 8)


async def test_a_redis_that_was_away_costs_no_live_lease(swept: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await swept.pass_s(2 * LEASE_S - 2)
    real = swept.broker.store.run

    async def away(*_: Any) -> Any:
        raise BrokerUnavailable("Redis does not answer")

    monkeypatch.setattr(swept.broker.store, "run", away)
    for _ in range(20):
        swept.clock.now_s += 1.0
        with pytest.raises(BrokerUnavailable):
            await swept.sweeper.sweep()
    monkeypatch.setattr(swept.broker.store, "run", real)
    swept._last_beat_s = swept.clock.now_s
    await swept.pass_s(2 * LEASE_S)
    assert await in_flight(swept.broker) == (8, 8)


async def test_a_machine_where_every_sweep_is_late_still_takes_leases_back_in_bounded_time(swept: Rig) -> None:
    num_sweeps = 0
    while await in_flight(swept.broker) != (8, 8):
        num_sweeps += 1
        assert num_sweeps <= 150
        swept.clock.now_s += 5.0
        assert await swept.broker.heartbeat(GEN, swept.live) == {}
        await swept.sweeper.sweep()


async def test_two_brokers_do_not_make_the_runs_clock_faster(swept: Rig, broker_rig: Any) -> None:
    other_clock = Clock()
    other = Sweeper(swept.broker.store, LEASE_S, other_clock)
    for _ in range(int(LEASE_S) + 8):
        swept.clock.now_s += 1.0
        await swept.sweeper.sweep()
        other_clock.now_s += 1.0
        await other.sweep()
    assert await in_flight(swept.broker) == (16, 0), "counted twice, the leases would have expired"


async def test_a_broker_that_starts_beside_a_running_clock_goes_on_with_it_at_once(swept: Rig) -> None:
    """Otherwise brokers that are killed in turn would keep a dead worker's leases for long."""
    await swept.pass_s(2 * LEASE_S - 3)
    other_clock = Clock()
    other = Sweeper(swept.broker.store, LEASE_S, other_clock)
    for _ in range(2):
        other_clock.now_s += 1.0
        await other.sweep()
        await swept.pass_s(1.0)
    for _ in range(5):  # the first broker is dead
        other_clock.now_s += 1.0
        await other.sweep()
    assert await in_flight(swept.broker) == (8, 8)


async def test_a_stopped_clock_does_not_show_that_another_broker_served_the_holders(swept: Rig) -> None:
    other_clock = Clock()
    other = Sweeper(swept.broker.store, LEASE_S, other_clock)
    for _ in range(3):
        other_clock.now_s += 1.0
        await other.sweep()
        await swept.pass_s(1.0)
    for _ in range(int(LEASE_S) + 3):
        other_clock.now_s += 1.0
        await other.sweep()
    assert await in_flight(swept.broker) == (16, 0)


async def test_a_broker_that_ends_is_followed_by_another_as_keeper_of_the_clock(swept: Rig) -> None:
    await swept.pass_s(LEASE_S)
    other_clock = Clock()
    other = Sweeper(swept.broker.store, LEASE_S, other_clock)
    for _ in range(int(3 * LEASE_S)):
        other_clock.now_s += 1.0
        await other.sweep()
    assert await in_flight(swept.broker) == (0, 16)


@pytest.mark.parametrize("step_ms", [15_000, -3_600_000])
async def test_a_step_of_redis_own_clock_takes_no_live_lease_back_and_keeps_no_dead_one(
    new_broker: Callable[..., Broker], broker_rig: Any, monkeypatch: pytest.MonkeyPatch, step_ms: int
) -> None:
    """The scripts read the time through one function, `now_ms`, which is shifted here by a key of the test's."""
    scripts = store_module._load_scripts()
    shifted = "return (tonumber(redis.call('GET', P .. 'step') or 0)) + tonumber(time[1])"
    monkeypatch.setattr(
        store_module,
        "_load_scripts",
        lambda: {name: text.replace("return tonumber(time[1])", shifted) for name, text in scripts.items()},
    )
    assert shifted in store_module._load_scripts()["sweep"]
    rig = Rig(new_broker(f"broker.lease_s={LEASE_S}"))
    await rig.begin(broker_rig)
    await rig.pass_s(LEASE_S + 2)
    await rig.broker.store.redis.set(rig.broker.store.prefix + "step", step_ms)
    await rig.pass_s(2.0)
    assert await in_flight(rig.broker) == (16, 0)
    await rig.pass_s(2 * LEASE_S)
    assert await in_flight(rig.broker) == (8, 8)


def test_leases_are_judged_by_the_runs_clock_alone() -> None:
    """Redis measures idle times of stream entries by its own clock: no script that takes leases back reads them."""
    for name in ("sweep", "lease_batch", "tick"):
        text = (store_module._FOLDER / f"{name}.lua").read_text(encoding="utf8")
        assert "IDLE" not in text
        assert "pending[3]" not in text


@pytest.mark.timeout(300)
@pytest.mark.heavy
async def test_a_real_broker_process_that_is_stopped_for_three_leases_takes_no_live_lease_back(
    tmp_path: Path, broker_rig: Any
) -> None:
    lease_s = 2.0
    config = broker_rig.config(
        f"broker.grpc={free_address()}",
        f"broker.redis_url={broker_rig.url}",
        f"problems.train={tmp_path / 'train.jsonl'}",
        f"broker.lease_s={lease_s}",
    )
    save_problems(tmp_path / "train.jsonl", broker_rig.problems)
    async with (
        BrokerClient(config.broker.grpc, GEN, patience_s=60) as client,
        BrokerClient(config.broker.grpc, DEAD, patience_s=60) as dead,
    ):
        process = await start_broker_process(tmp_path, config)
        async with ended(process), client.keep_leases() as keeper:
            await client.publish_policy(broker_rig.manifest(0))
            live = (await client.lease_tasks(8)).tasks
            for item in live:
                keeper.add(item.lease)
            await dead.lease_tasks(8)
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(3 * lease_s)
            os.kill(process.pid, signal.SIGCONT)
            begun_s = time.monotonic()
            while (await client.status()).ledger.in_flight["queued"] != 8:
                assert time.monotonic() - begun_s < 60, "the dead worker's leases are kept"
                await asyncio.sleep(0.1)
            assert keeper.take_lost() == {}
            refused = await client.submit_rollouts([(i.lease.lease_id, broker_rig.rollout(i.task)) for i in live])
            assert refused == frozenset()
