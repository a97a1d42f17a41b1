"""Leases on tasks and grading: one holder at a time, heartbeats, redelivery, dead letters, restarted workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nouscoder.broker import streams
from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerUnavailable, InvalidRequest
from nouscoder.broker.streams import LeaseRef, Stream, parse_lease
from nouscoder.broker.sweeper import keep_sweeping
from nouscoder.domain.lease import LeasedTask, LeaseLoss
from nouscoder.domain.verdict import VerdictKind

NewBroker = Callable[..., Broker]
GEN = "generation-h-0-1"
OTHER = "generation-h-1-1"


@pytest.fixture
async def broker(new_broker: NewBroker, broker_rig: Any) -> Broker:
    made = new_broker("broker.max_deliveries=2", "broker.max_regrades=1")
    await made.publish_policy(broker_rig.manifest(0))
    return made


async def expire(broker: Broker, rig: Any) -> None:
    store = rig.impatient_store(broker)
    await streams.sweep(store)
    await store.close()


async def test_a_rollout_is_under_one_lease_at_a_time(broker: Broker) -> None:
    answers = await asyncio.gather(*(broker.lease_tasks(f"generation-h-{i}-1", 3, 0) for i in range(8)))
    ids = [item.task.rollout_id for answer in answers for item in answer.tasks]
    assert len(ids) == 16
    assert len(set(ids)) == 16


async def test_admission_stops_at_k_times_b_and_goes_on_when_a_batch_is_made(broker: Broker, broker_rig: Any) -> None:
    assert len((await broker.lease_tasks(GEN, 100, 0)).tasks) == 16
    assert (await broker.status()).admission_slots_free == 0
    assert (await broker.lease_tasks(OTHER, 100, 0)).tasks == ()
    await expire(broker, broker_rig)
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, broker_rig.mixed)
    assert (await broker.lease_batch("learner-h-0-1", 0)).batch is not None
    assert (await broker.status()).admission_slots_free == 0, "a batch in training counts"
    await broker.commit_batch(0, 1)
    assert (await broker.status()).admission_slots_free == 0, "until its policy is published"
    await broker.publish_policy(broker_rig.manifest(1))
    assert (await broker.status()).admission_slots_free == 8
    tasks = (await broker.lease_tasks(OTHER, 100, 0)).tasks
    assert [item.task.min_policy_version for item in tasks] == [1] * 8


async def test_ids_problems_and_seeds_are_the_same_in_every_run_of_a_seed(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    async def first_tasks(seed: int) -> tuple[LeasedTask, ...]:
        broker = new_broker(f"run.seed={seed}")
        await broker.publish_policy(broker_rig.manifest(0))
        return (await broker.lease_tasks(GEN, 100, 0)).tasks

    first, second = [await first_tasks(7) for _ in range(2)]
    assert [item.task for item in first] == [item.task for item in second]
    assert first[0].task.rollout_id == "g000000-0"
    assert len({item.task.sampling.seed for item in first}) == 16
    assert first[0].task.prompt == next(
        p.prompt for p in broker_rig.problems if p.problem_id == first[0].task.problem_id
    )
    assert [item.task for item in await first_tasks(8)] != [item.task for item in first]


async def test_nothing_is_admitted_before_there_is_a_policy_to_sample_under(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = new_broker()
    assert (await broker.lease_tasks(GEN, 100, 0)).tasks == ()
    await broker.publish_policy(broker_rig.manifest(0))
    assert len((await broker.lease_tasks(GEN, 100, 0)).tasks) == 16


async def test_work_under_a_lost_lease_is_refused_and_the_new_holders_is_taken(broker: Broker, broker_rig: Any) -> None:
    first = (await broker.lease_tasks(GEN, 1, 0)).tasks[0]
    await expire(broker, broker_rig)
    assert (await broker.status()).ledger.in_flight["queued"] == 4
    second = (await broker.lease_tasks(OTHER, 1, 0)).tasks[0]
    assert second.task == first.task
    assert (first.lease.delivery, second.lease.delivery) == (1, 2)
    assert await broker.submit_rollouts(GEN, [broker_rig.sampled(first)]) == [first.task.rollout_id]
    assert await broker.submit_rollouts(OTHER, [broker_rig.sampled(second)]) == []
    assert (await broker.status()).streams[0].redeliveries == 1


async def test_handing_in_again_after_a_lost_answer_changes_nothing(broker: Broker, broker_rig: Any) -> None:
    leased = (await broker.lease_tasks(GEN, 4, 0)).tasks
    pairs = [broker_rig.sampled(item) for item in leased]
    assert await broker.submit_rollouts(GEN, pairs) == []
    before = await broker.status()
    assert await broker.submit_rollouts(GEN, pairs) == []
    assert await broker.status() == before
    assert before.streams[1].lag == 4


async def test_a_heartbeat_keeps_a_lease_and_tells_the_lost_ones(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = new_broker("broker.lease_s=10")
    await broker.publish_policy(broker_rig.manifest(0))
    kept, lost = (await broker.lease_tasks(GEN, 2, 0)).tasks
    await broker.store.run("tick", "a sweeper", 0, 6000)
    assert await broker.heartbeat(GEN, [kept.lease.lease_id]) == {}
    await broker.store.run("tick", "a sweeper", 0, 6000)
    await streams.sweep(broker.store)
    assert (await broker.status()).ledger.in_flight["sampling"] == 1
    assert await broker.heartbeat(GEN, [kept.lease.lease_id, lost.lease.lease_id]) == {
        lost.lease.lease_id: LeaseLoss.EXPIRED
    }
    assert list(await broker.heartbeat(OTHER, [kept.lease.lease_id])) == [kept.lease.lease_id]


async def test_the_brokers_own_sweep_gives_lost_work_to_who_waits_for_it(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = new_broker("broker.lease_s=0.2", "broker.pipeline_k=1", "broker.batch_size=4")
    await broker.publish_policy(broker_rig.manifest(0))
    sweeping = keep_sweeping(broker.store, broker.records, 0.2, broker.waits)
    sweeper = asyncio.create_task(sweeping)
    first = await broker.lease_tasks(GEN, 4, 0)
    second = await broker.lease_tasks(OTHER, 4, 10)
    sweeper.cancel()
    assert {item.task for item in second.tasks} <= {item.task for item in first.tasks}
    assert len(second.tasks) == 4


async def test_a_restarted_worker_frees_its_former_leases_at_once(broker: Broker) -> None:
    held = (await broker.lease_tasks(GEN, 16, 0)).tasks
    others = (await broker.lease_tasks(OTHER, 16, 0)).tasks
    assert others == ()
    again = (await broker.lease_tasks("generation-h-0-2", 16, 0)).tasks
    assert [item.task for item in again] == [item.task for item in held]
    assert {item.lease.delivery for item in again} == {2}
    assert list(await broker.heartbeat(GEN, [held[0].lease.lease_id])) == [held[0].lease.lease_id]


async def test_too_many_deliveries_make_a_dead_letter_and_its_group_goes_on_without_it(
    broker: Broker, broker_rig: Any
) -> None:
    leased = (await broker.lease_tasks(GEN, 4, 0)).tasks
    poison, rest = leased[0], leased[1:]
    await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in rest])
    await expire(broker, broker_rig)
    again = (await broker.lease_tasks(OTHER, 1, 0)).tasks[0]
    assert again.task == poison.task
    await broker_rig.grade(broker, broker_rig.mixed)
    await expire(broker, broker_rig)
    status = await broker.status()
    assert status.ledger.abandoned == 1
    assert status.ledger.in_flight["ready"] == 3
    assert status.streams[0].dead_letters == 1
    dead: Any = await broker.store.redis.xrange(broker.store.prefix + "dead")
    ((_, letter),) = dead
    assert letter[b"rollout"].decode() == poison.task.rollout_id


async def test_an_internal_error_is_graded_again_then_abandoned_and_never_rewarded(
    broker: Broker, broker_rig: Any
) -> None:
    await broker_rig.sample(broker, 4)

    def infrastructure_fails_for_one(rollout_id: str) -> VerdictKind:
        return VerdictKind.INTERNAL_ERROR if rollout_id.endswith("-0") else broker_rig.mixed(rollout_id)

    assert len(await broker_rig.grade(broker, infrastructure_fails_for_one)) == 4
    status = await broker.status()
    assert (status.ledger.in_flight["sampled"], status.ledger.in_flight["graded"], status.rollouts_graded) == (1, 3, 3)
    (again,) = await broker_rig.grade(broker, infrastructure_fails_for_one)
    assert again.rollout_id == "g000000-0"
    status = await broker.status()
    assert (status.ledger.abandoned, status.ledger.in_flight["ready"], status.rollouts_graded) == (1, 3, 3)
    assert status.streams[1].dead_letters == 1


async def test_a_waiting_caller_is_woken_by_the_work(broker: Broker, broker_rig: Any) -> None:
    waiting = asyncio.create_task(broker.lease_grading("verifier-h-0-1", 10, 10))
    await asyncio.sleep(0)
    await broker_rig.sample(broker, 4)
    assert len((await asyncio.wait_for(waiting, 60)).gradings) == 4


async def test_a_lease_on_something_else_is_refused_with_a_sentence(broker: Broker, broker_rig: Any) -> None:
    first, second = (await broker.lease_tasks(GEN, 2, 0)).tasks
    with pytest.raises(InvalidRequest, match="another rollout"):
        await broker.submit_rollouts(GEN, [(first.lease.lease_id, *broker_rig.sampled(second)[1:])])
    with pytest.raises(InvalidRequest, match="not a lease"):
        await broker.heartbeat(GEN, ["tasks:*:1:0"])
    with pytest.raises(InvalidRequest, match="not on grading"):
        await broker.submit_verdicts(
            "verifier-h-0-1", [(first.lease.lease_id, first.task.rollout_id, broker_rig.verdict())]
        )
    with pytest.raises(BrokerUnavailable, match="Redis has forgotten"):
        await broker.submit_rollouts(GEN, [broker_rig.sampled(first, version=1)])
    with pytest.raises(InvalidRequest, match="at least 1"):
        await broker.lease_tasks(GEN, 0, 0)


def test_lease_ids_read_back_as_written() -> None:
    ref = LeaseRef(Stream.GRADING, "1700000000000-3", 2, "0a1b")
    assert parse_lease(str(ref)) == ref
