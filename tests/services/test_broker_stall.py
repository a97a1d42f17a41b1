"""Why-stalled on a real broker: the snapshot of each staged stall leads to its cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerUnavailable
from nouscoder.broker.operations import read_snapshot
from nouscoder.domain.run_status import RunMode
from nouscoder.domain.stall import Holder, StallCause, StallSnapshot, judge
from nouscoder.domain.verdict import VerdictKind

NewBroker = Callable[..., Broker]
GEN, VER, LEARNER = "generation-h-0-1", "verifier-h-0-1", "learner-1"


@pytest.fixture
async def broker(new_broker: NewBroker, broker_rig: Any) -> Broker:
    made = new_broker("broker.max_regrades=1")
    await made.publish_policy(broker_rig.manifest(0))
    return made


async def snapshot_of(broker: Broker) -> StallSnapshot:
    return await read_snapshot(broker.store, await broker.status(), broker.rules, 6, 0.0)


async def last_commits_took(broker: Broker, gap_s: float) -> None:
    """Let the last two commits, which may fall into one millisecond, lie `gap_s` seconds apart."""
    redis: Any = broker.store.redis
    key = f"{broker.store.prefix}commits"
    (_, older), (newer_id, newer) = await redis.xrange(key)
    newer_ms = int(newer_id.partition(b"-")[0])
    await redis.delete(key)
    await redis.xadd(key, older, id=f"{newer_ms - round(gap_s * 1000)}-0")
    await redis.xadd(key, newer, id=newer_id)


def later(
    snapshot: StallSnapshot, seconds: float, *, beating: bool = True, moving: bool = False, asking: str = ""
) -> StallSnapshot:
    """The same after so long in which nothing else happened. `asking`: streams that workers still ask for."""

    def aged(holder: Holder) -> Holder:
        return replace(
            holder,
            held_s=holder.held_s + seconds,
            silent_s=holder.silent_s + (0 if beating else seconds),
            still_s=holder.still_s + (0 if moving else seconds),
        )

    batch = snapshot.batch
    if batch is not None:
        silent_s = batch.silent_s + (0 if beating else seconds)
        batch = replace(batch, held_s=batch.held_s + seconds, silent_s=silent_s)
    return replace(
        snapshot,
        since_commit_s=snapshot.since_commit_s + seconds,
        sampling=tuple(aged(holder) for holder in snapshot.sampling),
        grading=tuple(aged(holder) for holder in snapshot.grading),
        batch=batch,
        asked_s={s: a + (0 if s in asking else seconds) for s, a in snapshot.asked_s.items()},
    )


def causes(snapshot: StallSnapshot) -> list[StallCause]:
    return [blocker.cause for blocker in judge(snapshot)]


async def test_a_run_that_moves_is_not_stalled(broker: Broker, broker_rig: Any) -> None:
    await broker.lease_tasks(GEN, 100, 0)
    await broker.lease_grading(VER, 100, 0)
    await broker.lease_batch(LEARNER, 0)
    assert await broker.why_stalled() == ()
    assert causes(later(await snapshot_of(broker), 5000, moving=True)) == [], "long rollouts"


async def test_a_stall_at_generation_is_named(broker: Broker, broker_rig: Any) -> None:
    idle = later(await snapshot_of(broker), 60)
    assert causes(idle) == [StallCause.GENERATION_ABSENT]
    (leased,) = (await broker.lease_tasks(GEN, 1, 0)).tasks
    lease_id = leased.lease.lease_id
    await broker.heartbeat(GEN, [lease_id], [17])
    (holder,) = (await snapshot_of(broker)).sampling
    assert (holder.item_id, holder.worker_id, holder.paused) == ("g000000-0", GEN, False)
    assert causes(later(await snapshot_of(broker), 300)) == [StallCause.ENGINE_HUNG]
    assert causes(later(await snapshot_of(broker), 300, beating=False, asking="tasks")) == [
        StallCause.GENERATION_SILENT
    ]
    await broker.heartbeat(GEN, [lease_id], [17], paused=True)
    assert causes(later(await snapshot_of(broker), 300)) == [StallCause.ENGINE_PAUSED]
    await broker.heartbeat(GEN, [lease_id], [18])
    assert causes(later(await snapshot_of(broker), 300)) == [StallCause.ENGINE_HUNG], "the pause is over"


async def test_a_stall_at_the_verifier_is_named(broker: Broker, broker_rig: Any) -> None:
    await broker_rig.sample(broker)
    assert causes(later(await snapshot_of(broker), 60)) == [StallCause.VERIFIER_ABSENT]
    await broker.lease_grading(VER, 100, 0)
    assert causes(later(await snapshot_of(broker), 300)) == [StallCause.VERIFIER_HUNG]
    assert causes(later(await snapshot_of(broker), 300, beating=False)) == [StallCause.VERIFIER_SILENT]


async def test_a_stall_at_the_learner_is_named(broker: Broker, broker_rig: Any) -> None:
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, broker_rig.mixed)
    (blocker,) = judge(later(await snapshot_of(broker), 60))
    assert blocker.cause is StallCause.LEARNER_ABSENT
    assert "2 batches wait for training and nobody has ever asked for them" in blocker.reason
    await broker.lease_batch(LEARNER, 0)
    assert causes(later(await snapshot_of(broker), 300)) == [], "a long step"
    assert causes(later(await snapshot_of(broker), 3000)) == [StallCause.LEARNER_SLOW]
    (blocker,) = judge(later(await snapshot_of(broker), 60, beating=False))
    assert (blocker.cause, blocker.item_id, blocker.worker_id) == (StallCause.LEARNER_SILENT, "0", LEARNER)
    for number in (2, 3, 4):
        await broker.lease_batch(f"learner-{number}", 0)
    await broker.operations.report_batch_failure(0, "loss is NaN")
    (blocker,) = judge(later(await snapshot_of(broker), 60))
    assert blocker.cause is StallCause.LEARNER_CRASHES
    assert "4 learner processes, and none has committed it, last with: loss is NaN" in blocker.reason


async def test_it_is_judged_on_the_last_committed_batch(broker: Broker, broker_rig: Any) -> None:
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, broker_rig.mixed)
    for number in range(2):
        await broker.lease_batch(LEARNER, 0)
        await broker.publish_policy(broker_rig.manifest(number + 1))
        await broker.commit_batch(number, number + 1)
    await last_commits_took(broker, 7.0)
    snapshot = await snapshot_of(broker)
    assert snapshot.usual_batch_s == 7.0
    assert snapshot.since.graded == 0, "counted since the commit"
    slow = replace(snapshot, usual_batch_s=400.0)
    assert causes(later(slow, 1000)) == []
    (blocker,) = judge(later(slow, 1300))
    assert blocker.reason.startswith("No batch has been committed for 1300 s (one usually takes 400 s). ")


async def test_work_that_comes_to_nothing_is_reported(new_broker: NewBroker, broker_rig: Any) -> None:
    async def worked(kind: VerdictKind, *overrides: str) -> Broker:
        made = new_broker("broker.max_regrades=1", *overrides)
        await made.publish_policy(broker_rig.manifest(0))
        await broker_rig.sample(made)
        for _ in range(2):
            await broker_rig.grade(made, lambda _: kind)
        await made.lease_tasks(GEN, 1, 0)
        return made

    everyone = "tasks grading batches"
    filtered = later(await snapshot_of(await worked(VerdictKind.ACCEPTED)), 60, asking=everyone)
    assert causes(filtered) == [StallCause.ALL_FILTERED]
    assert "100% of the graded ones were accepted. The problems are too easy" in judge(filtered)[0].reason
    failed = later(await snapshot_of(await worked(VerdictKind.INTERNAL_ERROR)), 60, asking=everyone)
    assert causes(failed) == [StallCause.INTERNAL_ERRORS]
    # The last member of each group is cancelled when the third is given up.
    assert "failed 28 times" in judge(failed)[0].reason


async def test_groups_that_all_went_stale_are_reported(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = new_broker("broker.max_staleness=0")
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, broker_rig.mixed)
    await broker.publish_policy(broker_rig.manifest(1))
    await broker.lease_batch(LEARNER, 0)
    await broker.lease_tasks(GEN, 1, 0)
    snapshot = later(await snapshot_of(broker), 60, moving=True, asking="tasks grading batches")
    assert causes(snapshot) == [StallCause.ALL_STALE]


async def test_admission_that_waits_for_unpublished_policies_is_reported(broker: Broker, broker_rig: Any) -> None:
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, broker_rig.mixed)
    for number in range(2):
        await broker.lease_batch(LEARNER, 0)
        await broker.commit_batch(number, number + 1)
    (blocker,) = judge(later(await snapshot_of(broker), 60, asking="tasks grading batches"))
    assert blocker.cause is StallCause.ADMISSION_CLOSED
    assert "2 trained batches have no published policy" in blocker.reason


async def test_what_people_and_redis_do_is_reported_at_once(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = new_broker()
    assert causes(await snapshot_of(broker)) == [StallCause.NO_POLICY]
    await broker.publish_policy(broker_rig.manifest(0))
    for mode, cause in ((RunMode.PAUSED, StallCause.PAUSED), (RunMode.DRAINING, StallCause.DRAINING)):
        await broker.operations.set_mode(mode)
        assert causes(await snapshot_of(broker)) == [cause]
    await broker.operations.set_mode(RunMode.RUNNING)
    redis: Any = broker.store.redis
    try:
        await redis.config_set("maxmemory", 1)
        with pytest.raises(BrokerUnavailable):
            await broker.store.run("announce_records", "a record")
        assert [blocker.cause for blocker in await broker.why_stalled()] == [StallCause.REDIS_FULL]
    finally:
        await redis.config_set("maxmemory", 0)
    await broker.finish_run("over")
    assert await broker.why_stalled() == ()
