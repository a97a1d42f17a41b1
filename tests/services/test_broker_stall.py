"""WhyStalled names what blocks the next step, who holds it, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nouscoder.broker.core import Broker
from nouscoder.broker.stall import Snapshot, judge, read_snapshot

NewBroker = Callable[..., Broker]


async def snapshot_of(broker: Broker) -> Snapshot:
    return await read_snapshot(broker.store, await broker.status())


def later(snapshot: Snapshot, seconds: float, *, with_heartbeats: bool = False) -> Snapshot:
    """The same, had nothing happened for so long."""
    holders = tuple(
        replace(h, held_s=h.held_s + seconds, silent_s=h.silent_s + (0 if with_heartbeats else seconds))
        for h in snapshot.holders
    )
    return replace(snapshot, holders=holders, asked_s={s: a + seconds for s, a in snapshot.asked_s.items()})


@pytest.fixture
async def broker(new_broker: NewBroker, broker_rig: Any) -> Broker:
    made = new_broker()
    await made.publish_policy(broker_rig.manifest(0))
    return made


async def test_a_run_that_moves_has_no_blocker(broker: Broker, broker_rig: Any) -> None:
    await broker.lease_tasks("generation-h-0-1", 100, 0)
    await broker.lease_grading("verifier-h-0-1", 100, 0)
    await broker.lease_batch("learner-h-0-1", 0)
    assert await broker.why_stalled() == ()


async def test_a_rollout_held_too_long_is_named_with_its_worker_even_if_it_beats(broker: Broker) -> None:
    await broker.lease_tasks("generation-h-0-1", 1, 0)
    for with_heartbeats in (True, False):
        snapshot = later(await snapshot_of(broker), 25, with_heartbeats=with_heartbeats)
        blocker = next(b for b in judge(snapshot, broker.rules) if b.item_id)
        assert (blocker.item_id, blocker.worker_id) == ("g000000-0", "generation-h-0-1")
        assert 25 <= blocker.idle_s < 30
        assert f"last heartbeat {0 if with_heartbeats else 25} s ago" in blocker.reason


async def test_work_that_nobody_asks_for_is_told(broker: Broker, broker_rig: Any) -> None:
    await broker_rig.sample(broker)
    (blocker,) = await broker.why_stalled()
    assert blocker.reason == "16 rollouts wait for grading and no worker has ever asked"
    await broker_rig.grade(broker, broker_rig.mixed)
    assert any("2 batches wait for training" in b.reason for b in await broker.why_stalled())
    await broker.lease_batch("learner-h-0-1", 0)
    snapshot = await snapshot_of(broker)
    reasons = [b.reason for b in judge(later(snapshot, 100), broker.rules)]
    assert any(reason.startswith("batch 0 has been with learner-h-0-1 for training for 100 s") for reason in reasons)
    await broker.commit_batch(0, 1)
    await broker.publish_policy(broker_rig.manifest(1))
    reasons = [b.reason for b in judge(later(await snapshot_of(broker), 100), broker.rules)]
    assert any("wait for sampling and no worker has asked for 100 s" in reason for reason in reasons)


async def test_a_missing_policy_and_a_finished_run_are_told_apart(new_broker: NewBroker) -> None:
    broker = new_broker()
    assert any("no policy has been published" in b.reason for b in await broker.why_stalled())
    await broker.finish_run("over")
    assert await broker.why_stalled() == ()
