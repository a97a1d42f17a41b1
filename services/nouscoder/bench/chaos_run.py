"""The run that chaos disturbs, and how the faults of its plan (chaos_plan.py) are caused.

The run has all services of a local run as processes, and a Redis that fails on request. Generation has the fake engine,
the verifier the fake sandbox. The learner trains a small policy.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nouscoder.bench.chaos_plan import REDIS, FaultKind, PlannedFault, Strike
from nouscoder.bench.forgetful_redis import ForgetfulRedis, SteppedClock
from nouscoder.bench.measuring import BenchError
from nouscoder.config import Config, load_config
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.run.folder import RunFolder
from nouscoder.run.local_services import SERVICES, rewrite_addresses, service_spec
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
    faults = [_of_redis(run.redis, one) if one.target == REDIS else _of_others(run, one) for one in strike.faults]
    acts = [asyncio.ensure_future(fault) for fault in faults]
    try:
        await asyncio.gather(*acts)
    finally:
        for act in acts:
            act.cancel()
        await asyncio.gather(*acts, return_exceptions=True)


async def _of_redis(redis: ForgetfulRedis, fault: PlannedFault) -> None:
    steps: dict[FaultKind, tuple[Callable[[], None], Callable[[], None] | None]] = {
        FaultKind.KILL: (redis.die, redis.come_back),
        FaultKind.STOP: (redis.stop, redis.go_on),
        FaultKind.FILL: (redis.fill, redis.empty),
        FaultKind.ROLL_BACK: (redis.roll_back, None),
        FaultKind.WIPE: (redis.wipe, None),
    }
    begin, end = steps[fault.kind]
    try:
        await asyncio.to_thread(begin)
        if end is not None:
            await asyncio.sleep(fault.seconds)
    finally:
        if end is not None:
            await asyncio.to_thread(end)


async def _of_others(run: ChaosRun, fault: PlannedFault) -> None:
    match fault.kind:
        case FaultKind.SET_CLOCK:
            run.clock.step(fault.seconds)
        case FaultKind.TWIN:
            async with run.twin_of(fault.target):
                await asyncio.sleep(fault.seconds)
        case FaultKind.KILL:
            _signal(run, fault.target, signal.SIGKILL)
        case FaultKind.STOP:
            _signal(run, fault.target, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                _signal(run, fault.target, signal.SIGCONT)


def _signal(run: ChaosRun, service: str, number: signal.Signals) -> None:
    process = run.services[service]
    if process.state is ProcessState.RUNNING:
        process.signal_group(number)
