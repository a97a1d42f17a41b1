"""`nouscoder bench chaos`: a run whose services and Redis fail must go on, and train on nothing twice.

The seed decides the faults and their moments (chaos_plan.py). Their effects depend on what the processes are doing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nouscoder.bench.chaos_books import read_books
from nouscoder.bench.chaos_faults import cause
from nouscoder.bench.chaos_plan import Strike, count_by_name, plan_of
from nouscoder.bench.chaos_result import ChaosResult
from nouscoder.bench.chaos_run import ChaosRun, chaos_run
from nouscoder.bench.measuring import BenchError
from nouscoder.domain.run_status import RunStatus
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.worker_identity import observer_id

_LOOK_EVERY_S = 0.25
# For a step, or the end, after the last fault: all processes may have to start again on few cores.
_PATIENCE_S = 300.0
_LAST_STEPS = 3

Say = Callable[[str], None]


@dataclass(slots=True)
class _Observer:
    """Asks for the status all the time. `num_unbalanced` of `num_statuses` did not balance."""

    client: BrokerClient
    latest: RunStatus | None = None
    num_statuses: int = 0
    num_unbalanced: int = 0

    async def keep_looking(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                self.latest = await self.client.status()
            except PeerError:  # the broker or Redis is away, as it should be at times
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            self.num_statuses += 1
            self.num_unbalanced += not self.latest.ledger.balanced
            await asyncio.sleep(_LOOK_EVERY_S)

    async def until(self, what: str, condition: Callable[[RunStatus], bool], run: ChaosRun) -> RunStatus:
        """The first status that meets the condition. Raises BenchError, SupervisionError."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while self.latest is None or not condition(self.latest):
                    run.supervisor.check()
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            raise BenchError(
                f"{what} did not come within {_PATIENCE_S:.0f} s; the last status: {self.latest}"
            ) from None
        return self.latest


async def bench_chaos(minutes: float, seed: int, say: Say) -> ChaosResult:
    """Disturb a run for so long, then let it end. Raises BenchError when it does not, and SupervisionError.

    The files and logs of a run that broke a promise are kept.
    """
    folder = Path(tempfile.mkdtemp(prefix="nouscoder-chaos-"))
    holds = False
    try:
        result = await _disturbed_run(folder, plan_of(seed, 60 * minutes), seed, say)
        holds = not result.complaints
    finally:
        if holds:
            shutil.rmtree(folder)
        else:
            say(f"the run's files and logs are kept in {folder}")
    return result


async def _disturbed_run(folder: Path, plan: tuple[Strike, ...], seed: int, say: Say) -> ChaosResult:
    load_average = os.getloadavg()[0]
    async with (
        chaos_run(folder, seed) as run,
        BrokerClient(run.config.broker.grpc, observer_id("chaos"), patience_s=3.0) as client,
    ):
        observer = _Observer(client)
        looking = asyncio.ensure_future(observer.keep_looking())
        try:
            await observer.until("the first step", lambda status: status.step > 0, run)
            begun_s = time.monotonic()
            await _disturb(run, observer, plan, say)
            chaos_s = time.monotonic() - begun_s
            status = await _end(run, observer, say)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        trained = await asyncio.to_thread(read_books, run.config.run.folder, status.batches_committed)
    return ChaosResult(
        seed=seed,
        chaos_s=round(chaos_s, 1),
        num_cores=os.cpu_count() or 1,
        load_average=round(load_average, 1),
        faults=count_by_name(plan),
        num_pairs=sum(len(strike.faults) == 2 for strike in plan),
        num_forgettings=sum(fault.loses_writes for strike in plan for fault in strike.faults),
        trained=trained,
        rollouts_committed=status.ledger.trained,
        rollouts_lost=status.ledger.lost,
        num_statuses=observer.num_statuses,
        num_unbalanced=observer.num_unbalanced + (not status.ledger.balanced),
        ended=status.finished,
    )


async def _disturb(run: ChaosRun, observer: _Observer, plan: tuple[Strike, ...], say: Say) -> None:
    """Cause every strike of the plan at its moment, or as soon as Redis' fault before it has ended."""
    begun_s = time.monotonic()

    async def strike_at(strike: Strike) -> None:
        await asyncio.sleep(begun_s + strike.at_s - time.monotonic())
        step = observer.latest.step if observer.latest is not None else 0
        names = " and ".join(fault.name for fault in strike.faults)
        say(f"{time.monotonic() - begun_s:6.1f} s, step {step}: {names}")
        await cause(run, strike)

    strikes = [asyncio.ensure_future(strike_at(strike)) for strike in plan]
    try:
        for one in asyncio.as_completed(strikes):
            await one
            run.supervisor.check()
    finally:
        for one in strikes:
            one.cancel()
        await asyncio.gather(*strikes, return_exceptions=True)


async def _end(run: ChaosRun, observer: _Observer, say: Say) -> RunStatus:
    """The last status, after further steps and the end of the learner."""
    observer.latest = None
    now = await observer.until("a status after the last fault", lambda status: bool(status.run_id), run)
    say(f"no more faults; the run must make {_LAST_STEPS} further steps and end")
    target = now.step + _LAST_STEPS
    await observer.until(f"step {target}", lambda status: status.step >= target, run)
    await observer.client.finish_run("the chaos is over")
    learner = run.services["learner"]
    await observer.until("the end of the learner", lambda status: status.finished and learner.ended.is_set(), run)
    return await observer.client.status()
