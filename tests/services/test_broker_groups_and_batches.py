"""What becomes of complete groups, and the life of a batch up to its commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nouscoder.broker import batches
from nouscoder.broker.core import Broker
from nouscoder.broker.errors import InvalidRequest, InvariantBroken, Refused
from nouscoder.broker.rewards import Rewards
from nouscoder.config import RewardSection
from nouscoder.domain.batch import CompletedGroups
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.rpc.pairs import BATCH, PASSED_BATCH
from nouscoder.store.record_store import ByteRange
from nouscoder.store.rollout_record import decode_rollout

NewBroker = Callable[..., Broker]
LEARNER = "learner-h-0-1"


async def ready(new_broker: NewBroker, rig: Any, *overrides: str) -> Broker:
    """A broker whose 16 rollouts (4 groups) are all ready."""
    broker = new_broker(*overrides)
    await broker.publish_policy(rig.manifest(0))
    await rig.sample(broker)
    await rig.grade(broker, rig.mixed)
    assert (await broker.status()).ledger.in_flight["ready"] == 16
    return broker


async def test_a_group_of_equal_rewards_is_filtered_unless_it_may_stay(new_broker: NewBroker, broker_rig: Any) -> None:
    for flag, filtered in (("true", 16), ("false", 0)):
        broker = new_broker(f"broker.drop_zero_variance={flag}")
        await broker.publish_policy(broker_rig.manifest(0))
        await broker_rig.sample(broker)
        # Different verdicts of the same worth under the sign rule are still equal rewards.
        await broker_rig.grade(
            broker, lambda i: VerdictKind.RUNTIME_ERROR if i.endswith("0") else VerdictKind.WRONG_ANSWER
        )
        ledger = (await broker.status()).ledger
        assert (ledger.filtered, ledger.in_flight["ready"]) == (filtered, 16 - filtered)


@pytest.mark.parametrize(("other", "filtered"), [(0.3, 16), (0.3001, 0)])
async def test_rewards_that_differ_by_rounding_only_are_equal(
    new_broker: NewBroker, broker_rig: Any, monkeypatch: pytest.MonkeyPatch, other: float, filtered: int
) -> None:
    monkeypatch.setattr(Rewards, "of", lambda self, rollout, _: 0.1 + 0.2 if rollout.rollout_id[-1] == "0" else other)
    broker = new_broker()
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, broker_rig.mixed)
    assert (await broker.status()).ledger.filtered == filtered


async def test_a_group_with_fewer_than_two_verdicts_is_abandoned(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = new_broker("broker.max_regrades=1", "broker.drop_zero_variance=false")
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker, 4)
    for _ in range(2):
        await broker_rig.grade(
            broker, lambda i: VerdictKind.ACCEPTED if i.endswith("0") else VerdictKind.INTERNAL_ERROR
        )
    ledger = (await broker.status()).ledger
    assert (ledger.abandoned, sum(ledger.in_flight.values()), ledger.balanced) == (4, 0, True)


async def test_a_soft_reward_of_a_grading_that_stopped_early_is_refused(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = new_broker("broker.reward.rule=soft")
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker, 1)
    (item,) = (await broker.lease_grading("verifier-h-0-1", 1, 0)).gradings
    assert item.rules.run_all_tests
    early = Verdict(VerdictKind.WRONG_ANSWER, passed=1, total=5, graded=2, duration_s=0.1, backend="test")
    with pytest.raises(InvalidRequest, match="every test run"):
        await broker.submit_verdicts("verifier-h-0-1", [(item.lease.lease_id, item.rollout_id, early)])


async def test_the_reward_is_decided_when_the_verdict_comes_and_reaches_the_learner_bit_for_bit(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    """A broker that is restarted with another rule changes no reward that was decided before."""
    config = broker_rig.config("broker.reward.rule=soft", "broker.batch_size=4")
    broker = new_broker(config=config)
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker, 4)
    leased = (await broker.lease_grading("verifier-h-0-1", 4, 0)).gradings
    verdicts = {
        item.rollout_id: Verdict(VerdictKind.WRONG_ANSWER, passed, 7, 7, 0.1, "test")
        for passed, item in enumerate(leased)
    }
    items = [(item.lease.lease_id, item.rollout_id, verdicts[item.rollout_id]) for item in leased]
    assert await broker.submit_verdicts("verifier-h-0-1", items) == []
    signs = config.model_copy(update={"broker": config.broker.model_copy(update={"reward": RewardSection()})})
    batch = (await new_broker(config=signs).lease_batch(LEARNER, 0)).batch
    assert batch is not None
    assert [recorded.reward for recorded in batch.rollouts] == [passed / 7 for passed in range(4)]
    assert PASSED_BATCH.decode(PASSED_BATCH.encode(batch)) == batch, "nor does the message"
    assert await broker.commit_batch(0, 1) is False
    again = await broker.submit_verdicts("verifier-h-0-1", items)
    assert again == [item.rollout_id for item in leased], "a rollout that is final takes no verdict"


async def test_a_batch_holds_the_groups_that_completed_first_with_their_verdicts(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await ready(new_broker, broker_rig)
    leased = await broker.lease_batch(LEARNER, 0)
    assert leased.batch is not None
    assert leased.lease is not None
    assert leased.batch.batch_id == 0
    assert {group: len(ids) for group, ids in broker_rig.groups(leased.batch).items()} == {"g000000": 4, "g000001": 4}
    rollouts = broker_rig.read(leased.batch).rollouts
    for recorded in rollouts:
        assert recorded.verdict.kind is broker_rig.mixed(recorded.header.rollout_id)
        assert recorded.reward == (1.0 if recorded.verdict.kind is VerdictKind.ACCEPTED else -1.0)
    ranges = [ByteRange(recorded.record, 0, recorded.header.record_bytes) for recorded in rollouts]
    read = [piece async for pieces in broker.records.stream(ranges) for piece in pieces]
    assert [place for place, _ in read] == list(range(8))
    for recorded, (_, record) in zip(rollouts, read, strict=True):
        rollout = decode_rollout(record)
        assert rollout.rollout_id == recorded.header.rollout_id
        assert rollout.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert await broker.heartbeat(LEARNER, [leased.lease.lease_id]) == {}


async def test_a_group_is_sampled_at_the_temperature_of_its_batch(new_broker: NewBroker, broker_rig: Any) -> None:
    """Also when it is leased again after later batches: the members of a group have one temperature."""
    ramp = ("temperature=0.6", "final_temperature=1.0", "ramp_batches=2")
    settings = [f"generation.sampling.{one}" for one in ramp]
    broker = new_broker(*settings, "broker.pipeline_k=8", "broker.stale_policy=drop")
    await broker.publish_policy(broker_rig.manifest(0))
    first = await broker.lease_tasks("generation-1", 4, 0.0)
    assert [item.task.sampling.temperature for item in first.tasks] == [0.6] * 4
    await broker.publish_policy(broker_rig.manifest(1))
    await broker.release_leases("generation-1", [item.lease.lease_id for item in first.tasks[:2]])
    later = await broker.lease_tasks("generation-1", 6, 0.0)
    by_group = {item.task.group_id: item.task.sampling.temperature for item in later.tasks}
    assert by_group == {first.tasks[0].task.group_id: 0.6, "g000001": pytest.approx(0.8)}


async def test_a_batch_says_how_all_groups_ended_that_completed_while_it_gathered(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    """Of 4 groups the first is always right and the second always wrong: both are filtered, and both count."""
    broker = new_broker()
    await broker.publish_policy(broker_rig.manifest(0))
    ends = {"g000000": VerdictKind.ACCEPTED, "g000001": VerdictKind.WRONG_ANSWER}
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, lambda i: ends.get(i[:7]) or broker_rig.mixed(i))
    leased = await broker.lease_batch(LEARNER, 0)
    assert leased.batch is not None
    assert [*broker_rig.groups(leased.batch)] == ["g000002", "g000003"]
    assert leased.batch.completed == CompletedGroups(groups=4, solved=3, rollouts=16, accepted=8, reward_sum=0.0)
    assert (await broker.lease_batch(LEARNER, 0)).batch == leased.batch, "also when it is leased again"
    assert PASSED_BATCH.decode(PASSED_BATCH.encode(leased.batch)) == leased.batch
    assert BATCH.decode(PASSED_BATCH.encode(leased.batch)).completed == leased.batch.completed
    # The next batch has only those that completed since.
    await broker.commit_batch(0, 1)
    await broker.publish_policy(broker_rig.manifest(1))
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, broker_rig.mixed)
    later = (await broker.lease_batch(LEARNER, 0)).batch
    assert later is not None
    assert later.completed is not None
    assert later.completed.accepted == later.completed.rollouts // 2 == 2 * later.completed.groups > 0
    assert later.completed.reward_sum == 0.0


async def test_the_same_batch_comes_again_until_it_is_committed(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await ready(new_broker, broker_rig)
    first = await broker.lease_batch(LEARNER, 0)
    assert await broker.lease_batch(LEARNER, 0) == first
    restarted = await broker.lease_batch("learner-h-0-2", 0)
    assert restarted.batch == first.batch
    assert first.lease is not None
    assert restarted.lease is not None
    assert restarted.lease.delivery == 2
    assert list(await broker.heartbeat(LEARNER, [first.lease.lease_id])) == [first.lease.lease_id]
    assert (await broker.lease_batch("learner-h-9-1", 0)).batch is None, "another learner waits for the lease to expire"
    impatient = broker_rig.impatient_store(broker)
    taken = await batches.lease_batch(impatient, "learner-h-9-1", 1.0)
    await impatient.close()
    assert taken.batch == first.batch
    assert taken.lease is not None
    assert taken.lease.delivery == 3
    assert (await broker.status()).streams[2].redeliveries == 2


async def test_a_commit_counts_once_and_the_next_batch_is_another(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await ready(new_broker, broker_rig)
    first = (await broker.lease_batch(LEARNER, 0)).batch
    assert first is not None
    assert await broker.commit_batch(0, 4) is False
    assert await broker.commit_batch(0, 4) is True
    second = (await broker.lease_batch(LEARNER, 0)).batch
    assert second is not None
    assert second.batch_id == 1
    assert not set(broker_rig.groups(first)) & set(broker_rig.groups(second))
    status = await broker.status()
    assert (status.ledger.trained, status.step, status.batches_committed) == (8, 4, 1)
    with pytest.raises(Refused, match="not leased"):
        await broker.commit_batch(2, 8)


async def test_a_rollout_trained_before_makes_a_commit_fail_without_change(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await ready(new_broker, broker_rig)
    await broker.lease_batch(LEARNER, 0)
    await broker.store.redis.setbit(broker.store.prefix + "trained", 1, 1)
    before = await broker.status()
    with pytest.raises(InvariantBroken, match="trained on before"):
        await broker.commit_batch(0, 1)
    assert await broker.status() == before


async def test_groups_older_than_the_bound_are_stale_and_free_their_slots(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await ready(new_broker, broker_rig, "broker.max_staleness=1")
    await broker.publish_policy(broker_rig.manifest(1))
    assert (await broker.status()).admission_slots_free == 0
    await broker.publish_policy(broker_rig.manifest(2))
    assert (await broker.lease_batch(LEARNER, 0)).batch is None
    status = await broker.status()
    assert (status.ledger.stale, status.admission_slots_free) == (16, 16)
    await broker_rig.sample(broker, version=1)
    await broker_rig.grade(broker, broker_rig.mixed)
    leased = await broker.lease_batch(LEARNER, 0)
    assert leased.batch is not None
    assert leased.batch.policy_version == 2


async def test_short_groups_still_fill_a_batch_at_the_tightest_admission(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = new_broker("broker.pipeline_k=1", "broker.max_regrades=1")
    await broker.publish_policy(broker_rig.manifest(0))
    for _ in range(2):
        await broker_rig.sample(broker)
        await broker_rig.grade(broker, lambda i: VerdictKind.INTERNAL_ERROR if i.endswith("0") else broker_rig.mixed(i))
    leased = await broker.lease_batch(LEARNER, 0)
    assert leased.batch is not None
    assert [len(ids) for ids in broker_rig.groups(leased.batch).values()] == [3, 3]


async def test_policies_rise_by_one_and_keep_their_weights(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = new_broker()
    with pytest.raises(Refused, match="0 comes next"):
        await broker.publish_policy(broker_rig.manifest(1))
    assert await broker.publish_policy(broker_rig.manifest(0)) == 0
    assert await broker.publish_policy(broker_rig.manifest(0)) == 0
    with pytest.raises(Refused, match="other weights"):
        await broker.publish_policy(broker_rig.manifest(0, sha256="b" * 64))
    assert await broker.publish_policy(broker_rig.manifest(1)) == 1
    with pytest.raises(Refused, match="2 comes next"):
        await broker.publish_policy(broker_rig.manifest(0))


async def test_the_end_of_a_run_abandons_what_is_in_flight_once(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await ready(new_broker, broker_rig)
    await broker.lease_batch(LEARNER, 0)
    await broker.commit_batch(0, 1)
    await broker.publish_policy(broker_rig.manifest(1))
    held = (await broker.lease_tasks("generation-h-0-1", 3, 0)).tasks
    ledger = await broker.finish_run("enough")
    assert (ledger.admitted, ledger.trained, ledger.abandoned, ledger.balanced) == (20, 8, 12, True)
    assert await broker.finish_run("again") == ledger
    assert (await broker.lease_tasks("generation-h-0-1", 4, 20)).run_finished
    assert (await broker.lease_grading("verifier-h-0-1", 4, 20)).run_finished
    assert (await broker.lease_batch(LEARNER, 20)).run_finished
    late = [broker_rig.sampled(held[0])]
    assert await broker.submit_rollouts("generation-h-0-1", late) == [held[0].task.rollout_id]
    assert await broker.commit_batch(0, 1) is True
    assert (await broker.status()).admission_slots_free == 0


async def test_balanced_is_false_when_a_rollout_is_lost_or_doubled(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await ready(new_broker, broker_rig)
    live = broker.store.prefix + "live:ready"
    await broker.store.redis.srem(live, "g000000-0")
    assert not (await broker.status()).ledger.balanced
    await broker.store.redis.sadd(live, "g000000-0", "g999999-0")
    assert not (await broker.status()).ledger.balanced
    await broker.store.redis.srem(live, "g999999-0")
    assert (await broker.status()).ledger.balanced


async def test_nothing_is_kept_of_trained_rollouts_but_a_bit_and_the_commit_log(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = new_broker()
    await broker.publish_policy(broker_rig.manifest(0))
    for batch_id in range(3):
        await broker_rig.sample(broker, version=batch_id)
        await broker_rig.grade(broker, broker_rig.mixed)
        await broker.lease_batch(LEARNER, 0)
        await broker.commit_batch(batch_id, batch_id)
        await broker.publish_policy(broker_rig.manifest(batch_id + 1))
    await broker.records.delete_garbage()
    redis, prefix = broker.store.redis, broker.store.prefix
    assert await redis.bitcount(prefix + "trained") == 6, "a bit for each group"
    assert await redis.xlen(prefix + "commits") == 3
    assert len(await redis.keys(prefix + "rollout:*")) == 8, "one more batch is ready"
    assert len(await redis.keys(prefix + "record:*")) == 8
    assert len(await redis.keys(prefix + "group:*")) == 2
    assert await redis.xlen(prefix + "tasks") + await redis.xlen(prefix + "grading") == 0
