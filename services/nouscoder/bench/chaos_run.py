"""The run that chaos disturbs: all services of a local run as processes, and a Redis that fails on request.

Generation has the fake engine, the verifier the fake sandbox. The learner trains a small policy.

INVARIANT: faults of one strike come at the same moment, and two faults of Redis never overlap.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.bench.chaos_plan import REDIS, FaultKind, PlannedFault, Strike
from nouscoder.bench.forgetful_redis import ForgetfulRedis
from nouscoder.bench.measuring import BenchError
from nouscoder.bench.stepped_clock import SteppedClock
from nouscoder.config import Config, load_config
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.run.folder import RunFolder
from nouscoder.run.services import SERVICES, rewrite_addresses, service_spec
from nouscoder.run.supervisor import ProcessSpec, ProcessState, SupervisedProcess, Supervisor

GROUP_SIZE = 4
# Writes a small random policy folder. A process of its own, because it loads torch.
_WRITE_POLICY = """
import sys
from pathlib import Path
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
write_policy_folder(Path(sys.argv[1]), random_policy(int(sys.argv[2])))
"""
_BATCH_SIZE = 8
_NUM_PROBLEMS = 8
_NEVER = 1_000_000
_POLICY_LIMIT_S = 300.0
_RESTART_DELAY_S = 0.5
# Longer than a twin of the learner lives: it may hold the run folder when the learner starts again.
_FOLDER_PATIENCE_S = 120


@dataclass(frozen=True, slots=True)
class ChaosRun:
    """A run in progress, its processes, its Redis, and Redis' wall clock. A fault of Redis holds `redis_turn`."""

    config: Config
    folder: RunFolder
    supervisor: Supervisor
    redis: ForgetfulRedis
    clock: SteppedClock
    redis_turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def services(self) -> dict[str, SupervisedProcess]:
        """The processes that may be killed and stopped, by name."""
        return {process.spec.name: process for process in self.supervisor.processes}

    @asynccontextmanager
    async def twin_of(self, service: str) -> AsyncIterator[None]:
        """A second process of the service, with addresses of its own. It is killed at the end."""
        command = (*service_spec(self.folder, service).command, "--grpc", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
        spec = ProcessSpec(f"twin of {service}", command, self.folder.logs / f"twin-{service}.log")
        twin = SupervisedProcess(spec, _NEVER, _RESTART_DELAY_S, time.monotonic)
        alive = asyncio.create_task(twin.keep_alive())
        try:
            yield
        finally:
            alive.cancel()
            twin.signal_group(signal.SIGKILL)
            await asyncio.gather(alive, twin.wait(), return_exceptions=True)


@asynccontextmanager
async def chaos_run(folder: Path, seed: int) -> AsyncIterator[ChaosRun]:
    """Start the run in `folder`. All processes end with it. Raises BenchError, RedisServerError."""
    clock = await asyncio.to_thread(SteppedClock, folder / "clock")
    redis = await asyncio.to_thread(ForgetfulRedis, folder / "redis", clock.environment)
    run_folder = RunFolder.create(_config(folder, seed, redis.url))
    config = rewrite_addresses(run_folder, load_config(run_folder.config_file))
    supervisor = Supervisor(max_restarts_per_hour=_NEVER, restart_delay_s=_RESTART_DELAY_S)
    try:
        await _write_policy(config.run.folder / "policy", seed)
        for name in SERVICES:
            supervisor.start(service_spec(run_folder, name))
        yield ChaosRun(config, run_folder, supervisor, redis, clock)
    finally:
        await supervisor.close()
        await asyncio.to_thread(redis.close)
        run_folder.close()


def _config(folder: Path, seed: int, redis_url: str) -> Config:
    tests = StdinTests((StdinCase("1\n", "1\n"),))
    problems = [Problem(f"p{number}", f"Problem {number}.", tests) for number in range(_NUM_PROBLEMS)]
    save_problems(folder / "train.jsonl", problems)
    settings = [f"run.name=chaos-{seed}", f"run.root={folder}", f"run.seed={seed}", f"run.total_batches={_NEVER}"]
    settings += [f"problems.train={folder / 'train.jsonl'}", f"broker.redis_url={redis_url}"]
    settings += [f"broker.group_size={GROUP_SIZE}", f"broker.batch_size={_BATCH_SIZE}", "broker.pipeline_k=3"]
    # No program of the fake engine is right, so all rewards of a group are equal.
    settings += ["broker.drop_zero_variance=false", "generation.engine=fake", "verifier.sandbox.backend=fake"]
    settings += ["generation.sampling.max_new_tokens=16", "learner.steps_per_batch=1", "learner.peak_flops=1e9"]
    settings += [f"learner.keep_batches={_NEVER}", "learner.checkpoint_every_batches=5"]
    settings += [f"learner.folder_patience_s={_FOLDER_PATIENCE_S}"]
    return load_config(None, settings)


async def _write_policy(folder: Path, seed: int) -> None:
    command = [sys.executable, "-c", _WRITE_POLICY, str(folder), str(seed)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(_POLICY_LIMIT_S):
            if await process.wait():
                raise BenchError("the first policy could not be written")
    except TimeoutError:
        raise BenchError(f"writing the first policy took longer than {_POLICY_LIMIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# Causes the faults of a plan. Each is undone when it ends, also when it is cancelled; what was lost stays lost.

Act = Callable[[ChaosRun, PlannedFault], Awaitable[None]]


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


def _act_of(fault: PlannedFault) -> Act:
    return (_OF_REDIS if fault.target == REDIS else _OF_OTHERS)[fault.kind]


async def _kill(run: ChaosRun, fault: PlannedFault) -> None:
    _signal(run, fault.target, signal.SIGKILL)


async def _stop(run: ChaosRun, fault: PlannedFault) -> None:
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


async def _twin(run: ChaosRun, fault: PlannedFault) -> None:
    async with run.twin_of(fault.target):
        await asyncio.sleep(fault.seconds)


async def _set_clock(run: ChaosRun, fault: PlannedFault) -> None:
    run.clock.step(fault.seconds)


async def _kill_redis(run: ChaosRun, fault: PlannedFault) -> None:
    await asyncio.to_thread(run.redis.die)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await asyncio.to_thread(run.redis.come_back)


async def _stop_redis(run: ChaosRun, fault: PlannedFault) -> None:
    run.redis.stop()
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        run.redis.go_on()


async def _fill_redis(run: ChaosRun, fault: PlannedFault) -> None:
    await asyncio.to_thread(run.redis.fill)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await asyncio.to_thread(run.redis.empty)


async def _roll_back_redis(run: ChaosRun, fault: PlannedFault) -> None:
    await asyncio.to_thread(run.redis.roll_back)


async def _wipe_redis(run: ChaosRun, fault: PlannedFault) -> None:
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
