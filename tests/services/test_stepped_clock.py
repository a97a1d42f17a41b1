"""Redis' wall clock is set forwards and back, and neither the state nor a live lease suffers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.services.test_broker_sweeper import LEASE_S, Rig, in_flight

from nouscoder.bench.forgetful_redis import ForgetfulRedis, SteppedClock
from nouscoder.broker.core import Broker


def seconds_ahead(server: ForgetfulRedis) -> float:
    """How far Redis' clock is ahead of this machine's."""
    with redis.Redis.from_url(server.url) as client:
        return float(client.time()[0] - time.time())


def in_script_ahead(server: ForgetfulRedis) -> float:
    """The same, as a script sees it."""
    with redis.Redis.from_url(server.url) as client:
        return int(client.eval("return redis.call('TIME')[1]", 0)) - time.time()


@pytest.fixture
def clock(tmp_path: Path) -> SteppedClock:
    return SteppedClock(tmp_path / "clock")


@pytest.fixture
async def stepped_redis(tmp_path: Path, clock: SteppedClock) -> AsyncIterator[ForgetfulRedis]:
    server = ForgetfulRedis(tmp_path / "redis", clock.environment)
    yield server
    server.close()


async def test_steps_add_up_and_outlive_a_restart_of_redis(clock: SteppedClock, stepped_redis: ForgetfulRedis) -> None:
    assert abs(seconds_ahead(stepped_redis)) < 60
    clock.step(7200.4)
    assert abs(seconds_ahead(stepped_redis) - 7200) < 60
    clock.step(-3600)
    assert abs(in_script_ahead(stepped_redis) - 3600) < 60
    stepped_redis.die()
    stepped_redis.come_back()
    assert abs(seconds_ahead(stepped_redis) - 3600) < 60
    clock.step(-10800)
    assert abs(seconds_ahead(stepped_redis) + 7200) < 60


@pytest.mark.parametrize("step_s", [15.0, 3600.0, -3600.0])
async def test_a_step_of_redis_clock_takes_no_live_lease_back_and_keeps_no_dead_one(
    clock: SteppedClock, stepped_redis: ForgetfulRedis, broker_rig: Any, step_s: float
) -> None:
    broker = Broker(broker_rig.config(f"broker.lease_s={LEASE_S}"), stepped_redis.url, broker_rig.index)
    rig = Rig(broker)
    try:
        await rig.begin(broker_rig)
        await rig.pass_s(LEASE_S + 2)
        clock.step(step_s)
        await rig.pass_s(2)
        assert await in_flight(broker) == (16, 0), "the dead worker's lease has not expired yet"
        await rig.pass_s(2 * LEASE_S)
        assert await in_flight(broker) == (8, 8)
    finally:
        await broker.close()
