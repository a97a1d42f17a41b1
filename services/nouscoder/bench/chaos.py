"""`nouscoder bench chaos`: a run whose services and Redis fail must go on, and train on nothing twice.

The seed decides the faults and their moments (chaos_run.py). Their effects depend on what the processes are doing.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from nouscoder.bench.chaos_plan import Strike, count_by_name, plan_of
from nouscoder.bench.chaos_run import ChaosRun, cause, chaos_run
from nouscoder.bench.measuring import BenchError
from nouscoder.domain.run_status import RunStatus
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerError
from nouscoder.rpc.worker_id import observer_id


@dataclass(frozen=True, slots=True)
class Trained:
    """What the learner trained, by its own records.

    `steps` are the lines of metrics.jsonl. `in_order`: they are 1, 2, 3 ... without a gap. `longest_gap_s`: between a
    step and the next one. `rollouts` are those of committed batches; `rollouts_twice` are in two saved batches.
    """

    steps: int
    in_order: bool
    longest_gap_s: float
    rollouts: int
    rollouts_twice: int


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """What became of the run.

    `chaos_s`: seconds from the first step to the end of the last fault. `faults`: how often each one came. `num_pairs`
    times two came at the same moment, and `num_forgettings` times Redis lost acknowledged writes. `rollouts_committed`
    and `rollouts_lost` are the broker's counts. The ledger of `num_unbalanced` of `num_statuses` did not balance.
    `ended`: the run made further steps after the last fault, and its learner ended.
    """

    seed: int
    chaos_s: float
    num_cores: int
    load_average: float
    faults: dict[str, int]
    num_pairs: int
    num_forgettings: int
    trained: Trained
    rollouts_committed: int
    rollouts_lost: int
    num_statuses: int
    num_unbalanced: int
    ended: bool

    @property
    def complaints(self) -> list[str]:
        """Every promise that the run broke."""
        trained = self.trained
        complaints = []
        if trained.rollouts_twice:
            complaints.append(f"{trained.rollouts_twice} rollouts were trained on twice")
        if not trained.in_order:
            complaints.append("a step is missing, or came twice")
        if self.rollouts_committed != trained.rollouts:
            counts = f"the broker counts {self.rollouts_committed} trained rollouts, the learner {trained.rollouts}"
            complaints.append(counts)
        if self.num_unbalanced:
            complaints.append(f"{self.num_unbalanced} of {self.num_statuses} statuses do not balance")
        if not self.ended:
            complaints.append("the run did not end")
        return complaints


def as_text(result: ChaosResult) -> str:
    """The figures as readable lines."""
    faults = [f"{number} x {name}" for name, number in result.faults.items()]
    trained = result.trained
    return "\n".join(
        [
            f"seed {result.seed}, {result.chaos_s:.0f} s on {result.num_cores} cores,"
            f" load {result.load_average:.1f} at the start",
            f"{sum(result.faults.values())} faults, {result.num_pairs} times two at once: {', '.join(faults)}",
            f"{trained.steps} steps, each once and in order: {'yes' if trained.in_order else 'no'}; the longest gap"
            f" between two: {trained.longest_gap_s:.1f} s",
            f"{trained.rollouts} rollouts trained, {trained.rollouts_twice} of them twice by the learner's records",
            f"Redis forgot writes {result.num_forgettings} times; {result.rollouts_lost} rollouts are counted as lost",
            f"{result.num_statuses} statuses, {result.num_unbalanced} unbalanced; the run ended:"
            f" {'yes' if result.ended else 'no'}",
            *(f"BROKEN: {complaint}" for complaint in result.complaints),
        ]
    )


_EVERY_BATCH = 1_000_000


def read_trained(folder: Path, num_batches: int) -> Trained:
    """What a learner that committed so many batches trained. Raises SavedBatchError, OSError."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf8").splitlines()]
    gaps_s = [after["time"] - before["time"] for before, after in pairwise(lines)]
    # The learner saves a batch, then trains on it once.
    saved = SavedBatches(folder / "batches", _EVERY_BATCH)
    batches = {number: [one.rollout.rollout_id for one in saved.load(number).rollouts] for number in saved.numbers()}
    times = Counter(name for names in batches.values() for name in names)
    return Trained(
        steps=len(lines),
        in_order=[line["step"] for line in lines] == [*range(1, len(lines) + 1)],
        longest_gap_s=round(max(gaps_s, default=0.0), 1),
        rollouts=sum(len(names) for number, names in batches.items() if number < num_batches),
        rollouts_twice=sum(number > 1 for number in times.values()),
    )


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
        trained = await asyncio.to_thread(read_trained, run.config.run.folder, status.batches_committed)
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
