"""`nouscoder bench chaos`: a run whose services and Redis fail at random must go on, and train on nothing twice.

The seed decides the faults and their order. Their effects depend on what the processes are doing at that moment.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nouscoder.bench.chaos_faults import choose
from nouscoder.bench.chaos_run import ChaosRun, chaos_run, trained_rollouts
from nouscoder.bench.errors import BenchError
from nouscoder.domain.run_status import RunStatus
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.worker_identity import observer_id

_LONGEST_PAUSE_S = 6.0
_LOOK_EVERY_S = 0.25
# For a step, or the end, after the last fault: all processes may have to start again on few cores.
_PATIENCE_S = 300.0
_LAST_STEPS = 3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """What became of the run. `rollouts_trained` and `trained_twice` are by the learner's own books.

    `rollouts_lost` is what the status counts. `balanced`: the ledger of each status was, of `num_statuses`. `ended`:
    the run made further steps after the last fault, and its learner ended.
    """

    seed: int
    chaos_s: float
    num_cores: int
    load_average: float
    faults: dict[str, int]
    steps: int
    batches: int
    rollouts_trained: int
    trained_twice: int
    rollouts_lost: int
    num_statuses: int
    balanced: bool
    ended: bool

    @property
    def is_good(self) -> bool:
        """The run ended, nothing was trained on twice, and the ledger balanced."""
        return self.ended and self.balanced and not self.trained_twice


@dataclass(slots=True)
class _Observer:
    """Asks for the status all the time. `num_unbalanced` of `num_statuses` did not balance."""

    client: BrokerClient
    latest: RunStatus | None = None
    num_statuses: int = 0
    num_unbalanced: int = 0
    faults: Counter[str] = field(default_factory=Counter)

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
    """Disturb a run for so long, then let it end. Raises BenchError when it does not, and SupervisionError."""
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="nouscoder-chaos-") as name:
        async with (
            chaos_run(Path(name), seed) as run,
            BrokerClient(run.config.broker.grpc, observer_id("chaos"), patience_s=3.0) as client,
        ):
            observer = _Observer(client)
            looking = asyncio.ensure_future(observer.keep_looking())
            try:
                await observer.until("the first step", lambda status: status.step > 0, run)
                begun_s = time.monotonic()
                await _disturb(run, observer, random.Random(seed), begun_s + 60 * minutes, say)
                chaos_s = time.monotonic() - begun_s
                status = await _end(run, observer, say)
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
            trained = await asyncio.to_thread(trained_rollouts, run.config.run.folder / "batches")
    return ChaosResult(
        seed=seed,
        chaos_s=round(chaos_s, 1),
        num_cores=os.cpu_count() or 1,
        load_average=load_average,
        faults=dict(sorted(observer.faults.items())),
        steps=status.step,
        batches=status.batches_committed,
        rollouts_trained=len(trained),
        trained_twice=sum(times > 1 for times in trained.values()),
        rollouts_lost=status.ledger.lost,
        num_statuses=observer.num_statuses,
        balanced=observer.num_unbalanced == 0 and status.ledger.balanced,
        ended=status.finished,
    )


async def _disturb(run: ChaosRun, observer: _Observer, source: random.Random, end_s: float, say: Say) -> None:
    begun_s = time.monotonic()
    while time.monotonic() < end_s:
        await asyncio.sleep(source.uniform(0.1, _LONGEST_PAUSE_S))
        run.supervisor.check()
        fault = choose(source)
        step = observer.latest.step if observer.latest is not None else 0
        say(f"{time.monotonic() - begun_s:6.1f} s, step {step}: {fault.name}")
        await fault.act(run, source)
        observer.faults[fault.name] += 1


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


def as_text(result: ChaosResult) -> str:
    """The figures as readable lines."""
    faults = [f"{number} x {name}" for name, number in result.faults.items()]
    return "\n".join(
        [
            f"seed {result.seed}, {result.chaos_s:.0f} s on {result.num_cores} cores, load {result.load_average:.1f} at"
            f" the start; {sum(result.faults.values())} faults: {', '.join(faults) or 'none'}",
            f"{result.steps} steps, {result.batches} batches, {result.rollouts_trained} rollouts trained,"
            f" {result.trained_twice} of them twice by the learner's books",
            f"{result.rollouts_lost} rollouts lost; {result.num_statuses} statuses, balanced:"
            f" {'yes' if result.balanced else 'no'}; the run ended: {'yes' if result.ended else 'no'}",
        ]
    )


def as_record(result: ChaosResult) -> dict[str, Any]:
    """The figures as a record for scripts."""
    return asdict(result)
