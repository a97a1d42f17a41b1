"""`nouscoder bench generation`: the generation service, compared with its engine alone.

Broker, Redis and service are real processes. The service leases from the broker, as in a run; learner and verifier are
imitated in this process. The control is the same engine with the same policy, prompts and settings in a process that
does nothing else, while the service is paused. All share the cores of this machine. The speed of a machine changes
within minutes, so each round measures all three: the engine alone, the service, and the service with updates. Each
share is the median of the rounds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nouscoder.bench.generation_offline import bench_problems
from nouscoder.bench.generation_rig import Rig, engine_settings, running_rig, running_worker
from nouscoder.bench.measuring import BenchError, Machine
from nouscoder.config import load_config
from nouscoder.data.problems import save_problems
from nouscoder.rpc.generation_client import GenerationClient, GenerationStatus

UPDATE_EVERY_S = 2.0
SLOW_GRADING_S = 5.0
_POLL_S = 0.25
_WARM_UP_S = 3.0
_OFFLINE_LIMIT_S = 1200.0
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """The service over some seconds. `busy_share`: the share of the time in which it decoded.

    `running_share`: the mean number of rollouts being decoded, as a share of generation.max_running.
    `stolen_cpu_share`: the share of all cores' time that the hypervisor gave to other machines meanwhile.
    """

    seconds: float
    tokens_per_second: float
    busy_share: float
    running_share: float
    num_updates: int
    stolen_cpu_share: float


@dataclass(frozen=True, slots=True)
class SecondWorker:
    """A second worker that joins the run and leaves it again. `rollouts_lost` were forgotten, given up or too old.

    `both` is the window in which both work; its shares are means of the two.
    """

    both: MeasuredWindow
    rollouts_lost: int
    balanced: bool


@dataclass(frozen=True, slots=True)
class GenerationBench:
    """The figures of one run. `load_average` is that of the machine over the minute before the start.

    `offline_tokens_per_second`, `steady` and `updating` have one item for each round.
    """

    engine: str
    max_running: int
    num_cores: int
    load_average: float
    stolen_cpu_share: float
    offline_tokens_per_second: tuple[float, ...]
    steady: tuple[MeasuredWindow, ...]
    updating: tuple[MeasuredWindow, ...]
    slow_verifier: MeasuredWindow
    second_worker: SecondWorker
    update_pause_p50_s: float

    @property
    def share_of_offline(self) -> float:
        """Tokens/s of the service, without updates, in those of the engine alone."""
        rounds = zip(self.steady, self.offline_tokens_per_second, strict=True)
        return statistics.median(window.tokens_per_second / offline for window, offline in rounds)

    @property
    def share_while_updating(self) -> float:
        """Tokens/s with updates in those without."""
        rounds = zip(self.updating, self.steady, strict=True)
        return statistics.median(with_.tokens_per_second / without.tokens_per_second for with_, without in rounds)


async def bench_generation(
    engine: str = "torch", seconds: float = 10.0, python: str = sys.executable, overrides: Sequence[str] = ()
) -> GenerationBench:
    """All parts. `seconds` is the length of a window; `python` runs the engine. Raises BenchError."""
    machine = Machine()
    with tempfile.TemporaryDirectory(prefix="nouscoder-bench-") as name:
        folder = Path(name)
        save_problems(folder / "problems.jsonl", bench_problems())
        await _in_engine_python(python, "policies", str(folder))
        settings = engine_settings(engine, folder / "0", overrides)
        max_running = load_config(None, settings).generation.max_running
        async with running_rig(python, folder, folder / "problems.jsonl", settings) as rig:
            await _until_sampling(rig, rig.generation)
            alone, steady, updating = [], [], []
            for _ in range(_ROUNDS):
                alone.append(await _alone(rig, python, seconds, settings))
                steady.append(await _window(rig, [rig.generation], seconds, max_running))
                updating.append(await _updating_window(rig, seconds, max_running))
            second = await _second_worker(rig, seconds, max_running)
            rig.grading_s = SLOW_GRADING_S
            await asyncio.sleep(2 * SLOW_GRADING_S)  # until every rollout has had a slow verifier
            slow = await _window(rig, [rig.generation], max(seconds, 2 * SLOW_GRADING_S), max_running)
            pause_s = statistics.median(rig.pauses_s[1:])
    return GenerationBench(
        engine,
        max_running,
        machine.num_cores,
        machine.load_average,
        machine.stolen_share,
        tuple(alone),
        tuple(steady),
        tuple(updating),
        slow,
        second,
        pause_s,
    )


async def _alone(rig: Rig, python: str, seconds: float, settings: Sequence[str]) -> float:
    """Tokens per second of the engine alone, while the service is paused."""
    await rig.generation.pause(_OFFLINE_LIMIT_S)
    answer = await _in_engine_python(python, "rate", str(seconds), *settings)
    await rig.generation.resume()
    await asyncio.sleep(_WARM_UP_S)
    return float(json.loads(answer.splitlines()[-1])["tokens_per_second"])


async def _in_engine_python(python: str, *arguments: str) -> str:
    """Run generation_offline.py. Returns what it prints. Raises BenchError."""
    command = [python, "-m", "nouscoder.bench.generation_offline", *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        printed, errors = await asyncio.wait_for(process.communicate(), _OFFLINE_LIMIT_S)
    except TimeoutError:
        raise BenchError(f"the engine alone took longer than {_OFFLINE_LIMIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise BenchError(f"the engine alone failed: {errors.decode(errors='replace')[-2000:]}")
    return printed.decode()


async def _until_sampling(rig: Rig, worker: GenerationClient) -> None:
    """Until the worker samples, and some seconds more."""
    async with asyncio.timeout(_OFFLINE_LIMIT_S):
        while not (await worker.status()).num_tokens:
            _check(rig)
            await asyncio.sleep(_POLL_S)
    await asyncio.sleep(_WARM_UP_S)


async def _window(rig: Rig, workers: Sequence[GenerationClient], seconds: float, max_running: int) -> MeasuredWindow:
    """Measure the workers for `seconds`. Raises BenchError when the verifier has failed."""

    async def states() -> list[GenerationStatus]:
        return [await worker.status() for worker in workers]

    first, begun_s, updates_before = await states(), time.monotonic(), len(rig.pauses_s)
    machine = Machine()
    last, running = first, []
    while (spent_s := time.monotonic() - begun_s) < seconds:
        await asyncio.sleep(min(_POLL_S, seconds - spent_s))
        last = await states()
        running += [state.running_rollouts for state in last]
    _check(rig)
    idle_s = sum(after.idle_s - before.idle_s for before, after in zip(first, last, strict=True)) / len(workers)
    return MeasuredWindow(
        seconds=spent_s,
        tokens_per_second=sum(b.num_tokens - a.num_tokens for a, b in zip(first, last, strict=True)) / spent_s,
        busy_share=1 - idle_s / spent_s,
        running_share=statistics.mean(running) / max_running,
        num_updates=len(rig.pauses_s) - updates_before,
        stolen_cpu_share=machine.stolen_share,
    )


async def _second_worker(rig: Rig, seconds: float, max_running: int) -> SecondWorker:
    """Add a worker, measure both, and stop it while its rollouts are half-done."""
    async with running_worker(rig.command, []) as other:
        await _until_sampling(rig, other)
        both = await _window(rig, [rig.generation, other], seconds, max_running)
    ledger = (await rig.learner.status()).ledger
    return SecondWorker(both, ledger.abandoned + ledger.lost + ledger.stale, ledger.balanced)


async def _updating_window(rig: Rig, seconds: float, max_running: int) -> MeasuredWindow:
    """A window with an update every UPDATE_EVERY_S. Raises BenchError when the service has taken none."""

    async def publish() -> None:
        while True:
            await rig.publish()
            await asyncio.sleep(UPDATE_EVERY_S)

    publishing = asyncio.create_task(publish())
    try:
        window = await _window(rig, [rig.generation], seconds, max_running)
        if publishing.done():
            publishing.result()
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
    if not window.num_updates:
        raise BenchError(f"the service took no policy within {seconds:.0f} s")
    return window


def _check(rig: Rig) -> None:
    if rig.failures:
        raise BenchError(f"the verifier failed: {rig.failures[0]!r}")


def _rate(windows: Sequence[MeasuredWindow]) -> float:
    return statistics.median(window.tokens_per_second for window in windows)


def as_text(result: GenerationBench) -> str:
    """The figures as readable lines."""
    alone = statistics.median(result.offline_tokens_per_second)
    slow, second = result.slow_verifier, result.second_worker
    num_updates = sum(window.num_updates for window in result.updating)
    return "\n".join(
        [
            f"engine {result.engine}, {result.max_running} rollouts at once; {result.num_cores} cores,"
            f" load {result.load_average:.1f} at the start, {result.stolen_cpu_share:.1%} of the CPU stolen",
            f"engine alone: {alone:.0f} tokens/s",
            f"service: {_rate(result.steady):.0f} tokens/s, {result.share_of_offline:.1%} of the engine alone",
            f"with a policy every {UPDATE_EVERY_S:g} s: {_rate(result.updating):.0f} tokens/s,"
            f" {result.share_while_updating:.1%} of without; {num_updates} updates,"
            f" median pause {1000 * result.update_pause_p50_s:.0f} ms",
            f"with a second worker: {second.both.tokens_per_second:.0f} tokens/s; {second.rollouts_lost} rollouts lost"
            f" after it left, ledger balanced: {'yes' if second.balanced else 'NO'}",
            f"with a verifier that takes {SLOW_GRADING_S:g} s: busy {slow.busy_share:.1%} of the time,"
            f" {slow.running_share:.1%} of its places taken, {slow.tokens_per_second:.0f} tokens/s",
        ]
    )
