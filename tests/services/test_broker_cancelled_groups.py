"""A group that cannot be trained on any more ends at once: waiting members go, workers of the others learn why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from nouscoder.broker.core import Broker
from nouscoder.broker.metrics import BrokerCollector
from nouscoder.domain.lease import LeasedTask, LeaseLoss, RecordedGrading
from nouscoder.domain.verdict import VerdictKind

NewBroker = Callable[..., Broker]
GEN, VER, LEARNER = "generation-h-0-1", "verifier-h-0-1", "learner-h-0-1"


def of_group(tasks: tuple[LeasedTask, ...], number: int) -> list[LeasedTask]:
    return [item for item in tasks if item.task.group_id == f"g{number:06}"]


async def grade(broker: Broker, gradings: list[RecordedGrading], rig: Any) -> list[str]:
    verdicts = [(item.lease.lease_id, item.rollout_id, rig.verdict(rig.mixed(item.rollout_id))) for item in gradings]
    return await broker.submit_verdicts(VER, verdicts)


async def train(broker: Broker, rig: Any, batch_id: int) -> None:
    leased = await broker.lease_batch(LEARNER, 0)
    assert leased.batch is not None
    assert leased.batch.batch_id == batch_id
    await broker.commit_batch(batch_id, batch_id + 1)
    await broker.publish_policy(rig.manifest(batch_id + 1))


async def test_a_group_that_grows_stale_is_cancelled_whatever_its_members_are_doing(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    """After the second batch a token of version 0 is two versions old, for every batch to come."""
    broker = new_broker("broker.pipeline_k=3", "broker.max_staleness=1")
    await broker.publish_policy(broker_rig.manifest(0))
    tasks = (await broker.lease_tasks(GEN, 24, 0)).tasks
    for number in range(4):
        await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in of_group(tasks, number)])
    assert await grade(broker, list((await broker.lease_grading(VER, 16, 0)).gradings), broker_rig) == []
    mixed, unbegun = of_group(tasks, 4), of_group(tasks, 5)
    await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in mixed[:3]])
    graded, held = (await broker.lease_grading(VER, 2, 0)).gradings
    assert await grade(broker, [graded], broker_rig) == []
    await train(broker, broker_rig, 0)
    alive = [item.lease.lease_id for item in (mixed[3], *unbegun)]
    assert await broker.heartbeat(GEN, alive, oldest_versions=[0, None, None, None, None]) == {}
    await train(broker, broker_rig, 1)

    status = await broker.status()
    assert (status.ledger.stale, status.cancelled, status.ledger.balanced) == (4, {"stale": 3}, True)
    assert await broker.heartbeat(GEN, alive) == {mixed[3].lease.lease_id: LeaseLoss.STALE}
    assert await broker.heartbeat(VER, [held.lease.lease_id]) == {held.lease.lease_id: LeaseLoss.STALE}
    assert (await broker.lease_grading(VER, 10, 0)).gradings == (), "the member that waited is gone"
    assert await grade(broker, [held], broker_rig) == [held.rollout_id]
    late = broker_rig.sampled(mixed[3])
    assert await broker.submit_rollouts(GEN, [late]) == [mixed[3].task.rollout_id]

    slots = (await broker.status()).admission_slots_free
    told = await broker.heartbeat(GEN, alive[1:], oldest_versions=[1, None, 0, 1])
    assert told == dict.fromkeys(alive[1:], LeaseLoss.STALE), "one old token ends its whole group"
    status = await broker.status()
    assert (status.ledger.stale, status.cancelled, status.ledger.balanced) == (8, {"stale": 7}, True)
    assert status.admission_slots_free == slots + 4
    assert sum(status.ledger.in_flight.values()) == 0


async def test_a_rollout_that_comes_too_late_ends_its_group(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = new_broker("broker.max_staleness=0")
    await broker.publish_policy(broker_rig.manifest(0))
    tasks = (await broker.lease_tasks(GEN, 4, 0)).tasks
    await broker.publish_policy(broker_rig.manifest(1))
    assert await broker.submit_rollouts(GEN, [broker_rig.sampled(tasks[0], version=1)]) == []
    assert await broker.submit_rollouts(GEN, [broker_rig.sampled(tasks[1], version=0)]) == []
    lost = await broker.heartbeat(GEN, [item.lease.lease_id for item in tasks[2:]])
    assert set(lost.values()) == {LeaseLoss.STALE}
    assert (await broker.status()).ledger.stale == 4


async def test_the_last_member_of_a_group_is_not_sampled_on_when_the_others_are_given_up(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = new_broker("broker.max_regrades=1")
    await broker.publish_policy(broker_rig.manifest(0))
    last, *others = (await broker.lease_tasks(GEN, 4, 0)).tasks
    await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in others])
    for _ in range(2):
        assert await broker.heartbeat(GEN, [last.lease.lease_id]) == {}
        await broker_rig.grade(broker, lambda _: VerdictKind.INTERNAL_ERROR)
    assert await broker.heartbeat(GEN, [last.lease.lease_id]) == {last.lease.lease_id: LeaseLoss.TOO_SMALL}
    status = await broker.status()
    assert (status.ledger.abandoned, status.cancelled, status.ledger.balanced) == (4, {"too_small": 1}, True)
    assert len(await broker.operations.dead_letters()) == 3


async def test_leases_of_a_missing_problem_and_of_a_finished_run_are_lost_for_that_reason(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = new_broker()
    await broker.publish_policy(broker_rig.manifest(0))
    tasks = (await broker.lease_tasks(GEN, 8, 0)).tasks
    gone, other = tasks[0], of_group(tasks, 1)[0]
    await broker.store.run("drop_groups", gone.task.group_id, gone.task.problem_id)
    assert await broker.heartbeat(GEN, [gone.lease.lease_id]) == {gone.lease.lease_id: LeaseLoss.PROBLEM_GONE}
    await broker.finish_run("enough")
    assert await broker.heartbeat(GEN, [other.lease.lease_id]) == {other.lease.lease_id: LeaseLoss.FINISHED}

    status = await broker.status()
    assert status.cancelled == {"finished": 4, "problem_gone": 4}
    collector = BrokerCollector()
    collector.latest = status
    registry = CollectorRegistry()
    registry.register(collector)
    assert 'nouscoder_broker_cancelled_rollouts_total{reason="finished"} 4.0' in generate_latest(registry).decode()
