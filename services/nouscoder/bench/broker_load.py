"""Many workers at the broker at the same time: what a rollout costs with few and with many, and what waiting costs.

Each worker is a gRPC client with a connection of its own. The workers live in this process; the CPU time that is
reported is that of the broker and of Redis.

With --many: is the broker as fast and as small after so many rollouts over 24,000 problems?
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from nouscoder.bench.broker_process import (
    RunningBroker,
    Samples,
    bare_redis_ms,
    grade,
    manifest,
    read_records,
    sample,
)
from nouscoder.bench.measuring import BenchError
from nouscoder.rpc.broker_client import BrokerClient

_LIMIT_S = 300.0
_SETTLE_S = 2.0
_CONTROL_TIMES = 200


@dataclass(frozen=True, slots=True)
class Load:
    """`num_workers` of each kind take up to `at_once` rollouts of `num_tokens` tokens in a call.

    `reads_records`: the learner streams and decodes the records of its batches, as in a run.
    """

    num_workers: int
    at_once: int = 8
    num_tokens: int = 64
    reads_records: bool = False


@dataclass(frozen=True, slots=True)
class BrokerThroughput:
    """A load, measured over `num_rollouts` that were trained on."""

    load: Load
    num_rollouts: int
    rollouts_per_second: float
    cpu_ms_a_rollout: float
    redis_commands_a_rollout: float


@dataclass(frozen=True, slots=True)
class Flow:
    """A load whose learner reads the records, beside bare Redis: `redis_control_ms` is as in broker.WholeLife."""

    throughput: BrokerThroughput
    record_bytes: int
    redis_control_ms: float

    @property
    def share_of_redis(self) -> float:
        """Bytes a second, divided by those that bare Redis takes and gives."""
        return self.throughput.rollouts_per_second * self.redis_control_ms / 1000


@dataclass(frozen=True, slots=True)
class IdleWorkers:
    """`num_workers` in all that wait for work, none of which comes. Shares of one core."""

    num_workers: int
    broker_cpu_share: float
    redis_cpu_share: float


class Loop:
    """Trains batches of rollouts that workers sample and grade meanwhile. `record_bytes` is the size of one record."""

    def __init__(
        self, broker: RunningBroker, learner: BrokerClient, load: Load, work: list[asyncio.Task[None]]
    ) -> None:
        self.record_bytes = 0
        self._broker = broker
        self._learner = learner
        self._load = load
        self._work = work
        self._batches = 0

    async def train(self, batch: int, num_batches: int) -> BrokerThroughput:
        """Train so many batches of `batch` rollouts, and measure that. Raises BenchError, and what ended a worker."""
        broker = self._broker
        begun_s, cpu_before_s, commands_before = time.monotonic(), broker.all_cpu_s(), broker.redis_commands()
        try:
            for _ in range(num_batches):
                async with asyncio.timeout(_LIMIT_S):
                    leased = None
                    while leased is None:
                        for task in self._work:
                            if task.done():
                                task.result()
                        leased = (await self._learner.lease_batch(1.0)).batch
                    if len(leased.rollouts) != batch:
                        raise BenchError(f"batch {self._batches} holds {len(leased.rollouts)} rollouts, not {batch}")
                    if self._load.reads_records:
                        self.record_bytes = await read_records(self._learner, leased, self._load.num_tokens) // batch
                    await self._learner.publish_policy(manifest(self._batches + 1))
                    await self._learner.commit_batch(self._batches, self._batches + 1)
                    self._batches += 1
        except TimeoutError:
            raise BenchError(f"a batch of {batch} rollouts took longer than {_LIMIT_S:.0f} s") from None
        wall_s, trained = time.monotonic() - begun_s, batch * num_batches
        cpu_s, commands = broker.all_cpu_s() - cpu_before_s, broker.redis_commands() - commands_before
        return BrokerThroughput(self._load, trained, trained / wall_s, 1000 * cpu_s / trained, commands / trained)


@asynccontextmanager
async def at_work(broker: RunningBroker, load: Load) -> AsyncIterator[Loop]:
    """Workers that sample and grade until the context ends."""
    samples = Samples()
    async with AsyncExitStack() as stack:
        learner = await stack.enter_async_context(BrokerClient(broker.address, "learner-bench-0-1"))
        await learner.publish_policy(manifest(0))
        clients = [await _client(stack, broker, kind, n) for n in range(load.num_workers) for kind in _KINDS]
        work = [asyncio.create_task(_KINDS[kind](client, samples, load)) for kind, client in clients]
        try:
            yield Loop(broker, learner, load, work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)


async def flow(broker: RunningBroker, load: Load, batch: int, num_batches: int) -> Flow:
    """Train batches, the first one to warm up, and measure the control. Raises BenchError."""
    async with at_work(broker, load) as loop:
        await loop.train(batch, 1)
        throughput = await loop.train(batch, num_batches - 1)
    control_ms = bare_redis_ms(broker.redis, loop.record_bytes, _CONTROL_TIMES) if load.reads_records else 0.0
    return Flow(throughput, loop.record_bytes, control_ms)


async def idle_workers(broker: RunningBroker, num_workers: int, for_s: float) -> IdleWorkers:
    """Have workers wait for work, half of them to sample and half to grade. There is no policy, so none comes."""
    samples = Samples()
    async with AsyncExitStack() as stack:
        clients = [await _client(stack, broker, kind, number) for number in range(num_workers // 2) for kind in _KINDS]
        waits = [asyncio.create_task(_KINDS[kind](client, samples, Load(num_workers, 1))) for kind, client in clients]
        await asyncio.sleep(_SETTLE_S)
        begun_s, own_before_s, all_before_s = time.monotonic(), broker.cpu_s(), broker.all_cpu_s()
        await asyncio.sleep(for_s)
        wall_s, own_s = time.monotonic() - begun_s, broker.cpu_s() - own_before_s
        redis_s = broker.all_cpu_s() - all_before_s - own_s
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return IdleWorkers(num_workers, own_s / wall_s, redis_s / wall_s)


async def _client(stack: AsyncExitStack, broker: RunningBroker, kind: str, number: int) -> tuple[str, BrokerClient]:
    client = await stack.enter_async_context(BrokerClient(broker.address, f"{kind}-bench-{number}-1"))
    return kind, client


async def _generate(client: BrokerClient, samples: Samples, load: Load) -> None:
    while True:
        await sample(client, samples, load.at_once, load.num_tokens)


async def _grade(client: BrokerClient, samples: Samples, load: Load) -> None:
    while True:
        await grade(client, load.at_once)


_KINDS = {"generation": _generate, "verifier": _grade}
