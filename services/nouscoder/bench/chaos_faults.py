"""Causes the faults of a plan. Each is undone when it ends, also when it is cancelled; what was lost stays lost.

INVARIANT: faults of one strike come at the same moment, and two faults of Redis never overlap.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from nouscoder.bench.chaos_plan import REDIS, Fault, FaultKind, Strike
from nouscoder.bench.chaos_run import ChaosRun
from nouscoder.run.supervisor import ProcessState

Act = Callable[[ChaosRun, Fault], Awaitable[None]]


async def cause(run: ChaosRun, strike: Strike) -> None:
    """Cause the faults of the strike, and return when all of them have ended. Raises RedisServerError."""
    of_redis = [fault for fault in strike.faults if fault.target == REDIS]
    if not of_redis:
        await _all_at_once(run, strike)
        return
    async with run.redis_turn:
        for fault in of_redis:
            if fault.kind is FaultKind.ROLL_BACK:
                await asyncio.to_thread(run.redis.remember)
                await asyncio.sleep(fault.seconds)
        await _all_at_once(run, strike)


async def _all_at_once(run: ChaosRun, strike: Strike) -> None:
    acts = [asyncio.ensure_future(_act_of(fault)(run, fault)) for fault in strike.faults]
    try:
        await asyncio.gather(*acts)
    finally:
        for act in acts:
            act.cancel()
        await asyncio.gather(*acts, return_exceptions=True)


def _act_of(fault: Fault) -> Act:
    return (_OF_REDIS if fault.target == REDIS else _OF_OTHERS)[fault.kind]


async def _kill(run: ChaosRun, fault: Fault) -> None:
    _signal(run, fault.target, signal.SIGKILL)


async def _stop(run: ChaosRun, fault: Fault) -> None:
    with _stopped(run, fault.target):
        await asyncio.sleep(fault.seconds)


@contextmanager
def _stopped(run: ChaosRun, service: str) -> Iterator[None]:
    _signal(run, service, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(run, service, signal.SIGCONT)


def _signal(run: ChaosRun, service: str, number: signal.Signals) -> None:
    process = run.services[service]
    if process.state is ProcessState.RUNNING:
        process.signal_group(number)


async def _twin(run: ChaosRun, fault: Fault) -> None:
    async with run.twin_of(fault.target):
        await asyncio.sleep(fault.seconds)


async def _set_clock(run: ChaosRun, fault: Fault) -> None:
    run.clock.step(fault.seconds)


async def _kill_redis(run: ChaosRun, fault: Fault) -> None:
    await asyncio.to_thread(run.redis.die)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await asyncio.to_thread(run.redis.come_back)


async def _stop_redis(run: ChaosRun, fault: Fault) -> None:
    run.redis.stop()
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        run.redis.go_on()


async def _fill_redis(run: ChaosRun, fault: Fault) -> None:
    await asyncio.to_thread(run.redis.fill)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await asyncio.to_thread(run.redis.empty)


async def _roll_back_redis(run: ChaosRun, fault: Fault) -> None:
    await asyncio.to_thread(run.redis.roll_back)


async def _wipe_redis(run: ChaosRun, fault: Fault) -> None:
    await asyncio.to_thread(run.redis.wipe)


_OF_OTHERS: dict[FaultKind, Act] = {
    FaultKind.KILL: _kill,
    FaultKind.STOP: _stop,
    FaultKind.TWIN: _twin,
    FaultKind.SET_CLOCK: _set_clock,
}
_OF_REDIS: dict[FaultKind, Act] = {
    FaultKind.KILL: _kill_redis,
    FaultKind.STOP: _stop_redis,
    FaultKind.FILL: _fill_redis,
    FaultKind.ROLL_BACK: _roll_back_redis,
    FaultKind.WIPE: _wipe_redis,
}
