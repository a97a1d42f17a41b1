"""The faults of chaos. Each is undone when it ends, also when it is cancelled; what was lost stays lost."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from nouscoder.bench.chaos_run import ChaosRun
from nouscoder.run.supervisor import ProcessState

# Longer than a lease, so that leases of live workers are in question.
_LONGEST_STOP_S = 12.0
_LONGEST_AWAY_S = 5.0

Act = Callable[[ChaosRun, random.Random], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to the run, by name. `weight` is relative to the other faults."""

    name: str
    act: Act
    weight: int = 2


def _kill(service: str) -> Act:
    async def act(run: ChaosRun, source: random.Random) -> None:
        _signal(run, service, signal.SIGKILL)

    return act


def _stop(service: str) -> Act:
    async def act(run: ChaosRun, source: random.Random) -> None:
        _signal(run, service, signal.SIGSTOP)
        try:
            await asyncio.sleep(source.uniform(0.1, _LONGEST_STOP_S))
        finally:
            _signal(run, service, signal.SIGCONT)

    return act


def _signal(run: ChaosRun, service: str, number: signal.Signals) -> None:
    process = run.services[service]
    if process.state is ProcessState.RUNNING:
        process.signal_group(number)


async def _kill_redis(run: ChaosRun, source: random.Random) -> None:
    await asyncio.to_thread(run.redis.die)
    try:
        await asyncio.sleep(source.uniform(0.1, _LONGEST_AWAY_S))
    finally:
        await asyncio.to_thread(run.redis.come_back)


async def _stop_redis(run: ChaosRun, source: random.Random) -> None:
    run.redis.stop()
    try:
        await asyncio.sleep(source.uniform(0.1, _LONGEST_STOP_S))
    finally:
        run.redis.go_on()


async def _fill_redis(run: ChaosRun, source: random.Random) -> None:
    await asyncio.to_thread(run.redis.fill)
    try:
        await asyncio.sleep(source.uniform(0.1, _LONGEST_STOP_S))
    finally:
        await asyncio.to_thread(run.redis.empty)


async def _roll_back_redis(run: ChaosRun, source: random.Random) -> None:
    await asyncio.to_thread(run.redis.remember)
    await asyncio.sleep(source.uniform(0.1, _LONGEST_AWAY_S))
    await asyncio.to_thread(run.redis.roll_back)


async def _wipe_redis(run: ChaosRun, source: random.Random) -> None:
    await asyncio.to_thread(run.redis.wipe)


_SERVICES = ("broker", "verifier", "generation", "twin", "learner")
FAULTS = (
    *(Fault(f"kill {service}", _kill(service)) for service in _SERVICES),
    *(Fault(f"stop {service}", _stop(service), weight=1) for service in _SERVICES),
    Fault("kill redis", _kill_redis),
    Fault("stop redis", _stop_redis, weight=1),
    Fault("full redis", _fill_redis),
    Fault("redis rolled back", _roll_back_redis, weight=4),
    Fault("redis wiped", _wipe_redis),
)


def choose(source: random.Random) -> Fault:
    """One fault, by weight."""
    return source.choices(FAULTS, [fault.weight for fault in FAULTS])[0]
