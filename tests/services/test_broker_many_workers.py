"""Hundreds of workers on one broker: what each rollout costs Redis, and who is woken by what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nouscoder.broker.core import Broker

NewBroker = Callable[..., Broker]
WAIT_S = 5.0


async def commands_so_far(broker: Broker) -> int:
    """Commands that Redis has run, those inside of scripts among them."""
    return int((await broker.store.redis.info("stats"))["total_commands_processed"])


async def train_batches(broker: Broker, rig: Any, num_workers: int, num_batches: int) -> int:
    """Run `num_workers` of each kind, each with one rollout at a time, until so many batches are committed.

    Answers the rollouts that were trained on.
    """
    await broker.publish_policy(rig.manifest(0))

    async def generate(worker_id: str) -> None:
        while True:
            for item in (await broker.lease_tasks(worker_id, 1, WAIT_S)).tasks:
                version = item.task.min_policy_version
                assert await broker.submit_rollouts(worker_id, [rig.sampled(item, version)]) == []

    async def grade(worker_id: str) -> None:
        while True:
            for item in (await broker.lease_grading(worker_id, 1, WAIT_S)).gradings:
                verdict = (item.lease.lease_id, item.rollout_id, rig.verdict(rig.mixed(item.rollout_id)))
                assert await broker.submit_verdicts(worker_id, [verdict]) == []

    async def learn() -> int:
        trained = 0
        for number in range(num_batches):
            batch = None
            while batch is None:
                batch = (await broker.lease_batch("learner-h-0-1", WAIT_S)).batch
            trained += len(batch.rollouts)
            await broker.publish_policy(rig.manifest(number + 1))
            await broker.commit_batch(number, number + 1)
        return trained

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        workers = [group.create_task(generate(f"generation-h-{n}-1")) for n in range(num_workers)]
        workers += [group.create_task(grade(f"verifier-h-{n}-1")) for n in range(num_workers)]
        trained = await learn()
        for worker in workers:
            worker.cancel()
    return trained


async def commands_a_rollout(broker: Broker, rig: Any, num_workers: int) -> float:
    """Redis commands for each rollout that is trained on."""
    before = await commands_so_far(broker)
    trained = await train_batches(broker, rig, num_workers, num_batches=6)
    return (await commands_so_far(broker) - before) / trained


async def test_a_rollout_costs_as_many_commands_with_128_workers_of_each_kind_as_with_4(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    few, many = [
        await commands_a_rollout(new_broker("broker.batch_size=64"), broker_rig, number) for number in (4, 128)
    ]
    print(f"commands a rollout: {few:.0f} with 4 + 4 workers, {many:.0f} with 128 + 128")
    assert many < 1.5 * few
    assert many < 200


async def test_waiting_costs_the_same_however_many_wait(new_broker: NewBroker, broker_rig: Any) -> None:
    async def commands_while_idle(num_workers: int) -> float:
        broker = new_broker()
        kinds = (broker.lease_tasks, broker.lease_grading)
        waits = [asyncio.create_task(lease(f"w-{n}-1", 1, 30)) for n in range(num_workers // 2) for lease in kinds]
        async with asyncio.timeout(60):
            while len(broker.waits.tasks) + len(broker.waits.grading) < num_workers:
                await asyncio.sleep(0.05)
        before = await commands_so_far(broker)
        await asyncio.sleep(2)
        cost = (await commands_so_far(broker) - before) / 2
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        return cost

    idle = {number: await commands_while_idle(number) for number in (2, 256)}
    print(f"commands a second: {idle}")
    assert idle[256] < idle[2] + 20


async def test_more_calls_at_once_than_connections_wait_for_one(new_broker: NewBroker) -> None:
    broker = new_broker()
    answers = await asyncio.gather(*(broker.status() for _ in range(600)))
    assert len(answers) == 600
    connected = int((await broker.store.redis.info("clients"))["connected_clients"])
    assert connected < 100


@pytest.mark.parametrize("num_waiting", [1, 40])
async def test_work_through_one_broker_wakes_who_waits_at_another(
    new_broker: NewBroker, broker_rig: Any, num_waiting: int
) -> None:
    here = new_broker()
    there = new_broker(config=here._config)
    await here.publish_policy(broker_rig.manifest(0))
    tasks = (await here.lease_tasks("generation-h-0-1", 8, 0)).tasks
    waiting = [asyncio.create_task(there.lease_grading(f"verifier-h-{n}-1", 1, 30)) for n in range(num_waiting)]
    await asyncio.sleep(0.2)
    await here.submit_rollouts("generation-h-0-1", [broker_rig.sampled(item) for item in tasks])
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(60):
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < min(8, num_waiting):
            done, pending = await asyncio.wait(waiting, timeout=0.05)
    assert asyncio.get_running_loop().time() - begun < 5
    assert sum(len(task.result().gradings) for task in done) == min(8, num_waiting)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
