"""A crowd at the broker: what a rollout costs with few and with many workers, and what idle workers cost.

Each worker is a gRPC client with a connection of its own, and takes up to _AT_ONCE rollouts at a time. The crowd lives
in this process; counted is the CPU time of the broker and of Redis.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from nouscoder.bench.broker_process import RunningBroker
from nouscoder.bench.broker_workers import Samples, manifest, verdict_of
from nouscoder.bench.errors import BenchError
from nouscoder.domain.rollout import Rollout
from nouscoder.rpc.broker_client import BrokerClient

_AT_ONCE = 8
_NUM_TOKENS = 64
_WAIT_S = 20.0
_LIMIT_S = 300.0
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """`num_workers` of each kind with work, measured over `num_rollouts` that were trained on."""

    num_workers: int
    num_rollouts: int
    rollouts_per_second: float
    cpu_ms_a_rollout: float
    redis_commands_a_rollout: float


@dataclass(frozen=True, slots=True)
class IdleCrowd:
    """`num_workers` in all that wait for work, none of which comes. Shares of one core."""

    num_workers: int
    broker_cpu_share: float
    redis_cpu_share: float


async def busy_crowd(broker: RunningBroker, num_workers: int, batch: int, num_batches: int) -> Crowd:
    """Train batches with so many workers of each kind; the first batch warms up. Raises BenchError."""
    samples = Samples()
    async with AsyncExitStack() as stack, asyncio.timeout(_LIMIT_S):
        learner = await stack.enter_async_context(BrokerClient(broker.address, "learner-bench-0-1"))
        await learner.publish_policy(manifest(0))
        clients = [await _client(stack, broker, kind, number) for number in range(num_workers) for kind in _KINDS]
        work = [asyncio.create_task(_KINDS[kind](client, samples)) for kind, client in clients]
        try:
            await _train(learner, work, 0, batch)
            begun_s, cpu_before_s, commands_before = time.monotonic(), broker.all_cpu_s(), broker.redis_commands()
            for number in range(1, num_batches):
                await _train(learner, work, number, batch)
            wall_s = time.monotonic() - begun_s
            cpu_s, commands = broker.all_cpu_s() - cpu_before_s, broker.redis_commands() - commands_before
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
    trained = batch * (num_batches - 1)
    return Crowd(num_workers, trained, trained / wall_s, 1000 * cpu_s / trained, commands / trained)


async def idle_crowd(broker: RunningBroker, num_workers: int, for_s: float) -> IdleCrowd:
    """Have workers wait for work, half of them to sample and half to grade. There is no policy, so none comes."""
    async with AsyncExitStack() as stack:
        clients = [await _client(stack, broker, kind, number) for number in range(num_workers // 2) for kind in _KINDS]
        waits = [asyncio.create_task(_wait(kind, client)) for kind, client in clients]
        await asyncio.sleep(_SETTLE_S)
        begun_s, own_before_s, all_before_s = time.monotonic(), broker.cpu_s(), broker.all_cpu_s()
        await asyncio.sleep(for_s)
        wall_s, own_s = time.monotonic() - begun_s, broker.cpu_s() - own_before_s
        redis_s = broker.all_cpu_s() - all_before_s - own_s
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return IdleCrowd(num_workers, own_s / wall_s, redis_s / wall_s)


async def _client(stack: AsyncExitStack, broker: RunningBroker, kind: str, number: int) -> tuple[str, BrokerClient]:
    client = await stack.enter_async_context(BrokerClient(broker.address, f"{kind}-bench-{number}-1"))
    return kind, client


async def _generate(client: BrokerClient, samples: Samples) -> None:
    while True:
        tasks = (await client.lease_tasks(_AT_ONCE, _WAIT_S)).tasks
        rollouts: list[tuple[str, Rollout]] = [
            (item.lease.lease_id, samples.rollout(item, _NUM_TOKENS, item.task.min_policy_version)) for item in tasks
        ]
        if rollouts and await client.submit_rollouts(rollouts):
            raise BenchError("the broker refused a rollout whose lease was alive")


async def _grade(client: BrokerClient, samples: Samples) -> None:
    while True:
        gradings = (await client.lease_grading(_AT_ONCE, _WAIT_S)).gradings
        verdicts = [(item.lease.lease_id, item.rollout_id, verdict_of(item.rollout_id)) for item in gradings]
        if verdicts and await client.submit_verdicts(verdicts):
            raise BenchError("the broker refused a verdict whose lease was alive")


_KINDS = {"generation": _generate, "verifier": _grade}


async def _wait(kind: str, client: BrokerClient) -> None:
    while True:
        if kind == "generation":
            await client.lease_tasks(_AT_ONCE, _WAIT_S)
        else:
            await client.lease_grading(_AT_ONCE, _WAIT_S)


async def _train(learner: BrokerClient, work: list[asyncio.Task[None]], number: int, batch: int) -> None:
    """Wait for a batch and commit it. Raises BenchError, and what ended a worker."""
    leased = None
    while leased is None:
        for task in work:
            if task.done():
                task.result()
        leased = (await learner.lease_batch(1.0)).batch
    if len(leased.rollouts) != batch:
        raise BenchError(f"batch {number} holds {len(leased.rollouts)} rollouts, not {batch}")
    await learner.publish_policy(manifest(number + 1))
    await learner.commit_batch(number, number + 1)
