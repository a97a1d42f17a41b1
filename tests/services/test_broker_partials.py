"""The broker keeps the tokens of a rollout in progress: added by the holder of its lease, read by the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nouscoder.broker.core import Broker
from nouscoder.broker.errors import InvalidRequest, RedisFull
from nouscoder.broker.store import Pressure
from nouscoder.domain.lease import LeasedTask, LeaseLoss
from nouscoder.domain.partial import EncodedPiece, PartialRollout, tokens_from
from nouscoder.domain.tokens import SampledTokens, float32, int32, spans_of
from nouscoder.store.pieces import decode_pieces, encode_piece

NewBroker = Callable[..., Broker]
GEN, OTHER = "generation-h-0-1", "generation-h-1-1"
NUM_TOKENS = 40
PROMPT = int32([1, 2, 3])


def known(num_sampled: int, version: int = 0) -> list[Any]:
    """A rollout of which so many tokens were sampled."""
    ids = range(100, 100 + num_sampled)
    return [PROMPT, SampledTokens(int32(ids), float32([-0.5] * num_sampled), spans_of([version] * num_sampled))]


def piece(item: LeasedTask, first_token: int, num_sampled: int, version: int = 0) -> EncodedPiece:
    """The tokens from number `first_token` on, when `num_sampled` were sampled."""
    tokens = tokens_from(known(num_sampled, version), first_token)
    return encoded(item, tokens)


def encoded(item: LeasedTask, tokens: PartialRollout) -> EncodedPiece:
    return EncodedPiece(
        item.lease.lease_id,
        tokens.first_token,
        tokens.end_token,
        tokens.oldest_version,
        tokens.newest_version,
        encode_piece(tokens),
    )


@pytest.fixture
async def broker(new_broker: NewBroker, broker_rig: Any) -> Broker:
    broker = new_broker()
    await broker.publish_policy(broker_rig.manifest(0))
    return broker


async def lease(broker: Broker, worker: str = GEN, count: int = 1) -> LeasedTask:
    return (await broker.lease_tasks(worker, count, 0)).tasks[0]


async def kept(broker: Broker, item: LeasedTask) -> PartialRollout | None:
    data = await broker.partials.read(item.task.rollout_id)
    return decode_pieces(data) if data else None


async def partial_keys(broker: Broker) -> list[str]:
    names = [name async for name in broker.store.redis.scan_iter(match=f"{broker.store.prefix}partial:*", count=1000)]
    return [name.decode() if isinstance(name, bytes) else name for name in names]


async def test_the_next_holder_gets_the_tokens_and_adds_to_them(broker: Broker, broker_rig: Any) -> None:
    first = await lease(broker)
    assert first.num_kept_tokens == 0
    assert await broker.partials.keep(GEN, [piece(first, 0, 10)]) == [13]
    assert await broker.partials.keep(GEN, [piece(first, 13, 25)]) == [28]
    await broker_rig.impatient_sweep(broker)
    second = await lease(broker, OTHER)
    assert (second.task, second.num_kept_tokens) == (first.task, 28)
    assert await kept(broker, second) == tokens_from(known(25), 0)
    assert await broker.partials.keep(OTHER, [piece(second, 28, 30)]) == [33]
    assert await kept(broker, second) == tokens_from(known(30), 0)


async def test_only_the_holder_of_the_lease_can_add_tokens(broker: Broker, broker_rig: Any) -> None:
    first = await lease(broker)
    assert await broker.partials.keep(GEN, [piece(first, 0, 10)]) == [13]
    assert await broker.partials.keep(OTHER, [piece(first, 13, 20)]) == [-1], "the lease of somebody else"
    await broker_rig.impatient_sweep(broker)
    assert await broker.partials.keep(GEN, [piece(first, 13, 20)]) == [-1], "a lease that expired"
    second = await lease(broker, OTHER)
    assert await broker.partials.keep(GEN, [piece(first, 0, 20)]) == [-1], "a former delivery"
    assert await kept(broker, second) == tokens_from(known(10), 0)


async def test_a_report_that_comes_twice_or_leaves_a_gap_changes_nothing(broker: Broker) -> None:
    item = await lease(broker)
    for _ in range(2):
        assert await broker.partials.keep(GEN, [piece(item, 0, 10)]) == [13]
    for _ in range(2):
        assert await broker.partials.keep(GEN, [piece(item, 13, 20)]) == [23]
    assert await broker.partials.keep(GEN, [piece(item, 28, 30)]) == [23]
    assert await kept(broker, item) == tokens_from(known(20), 0)


async def test_a_piece_from_the_start_replaces_what_is_kept(broker: Broker, broker_rig: Any) -> None:
    """The next worker could not use the kept tokens, and sampled others."""
    first = await lease(broker)
    await broker.partials.keep(GEN, [piece(first, 0, 30)])
    await broker_rig.impatient_sweep(broker)
    second = await lease(broker, OTHER)
    assert await broker.partials.keep(OTHER, [piece(second, 0, 5)]) == [8]
    assert await kept(broker, second) == tokens_from(known(5), 0)


async def test_leases_that_are_given_back_leave_their_tokens_to_the_next_worker(broker: Broker) -> None:
    first = await lease(broker)
    await broker.partials.keep(GEN, [piece(first, 0, 30)])
    await broker.release_leases(GEN)
    second = await lease(broker, OTHER)
    assert (second.task, second.num_kept_tokens) == (first.task, 33)


async def test_the_memory_is_freed_when_the_rollout_is_submitted(broker: Broker, broker_rig: Any) -> None:
    leased = (await broker.lease_tasks(GEN, 4, 0)).tasks
    await broker.partials.keep(GEN, [piece(item, 0, 30) for item in leased])
    assert len(await partial_keys(broker)) == 4
    assert await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in leased]) == []
    assert await partial_keys(broker) == []
    assert await broker.partials.keep(GEN, [piece(leased[0], 0, 35)]) == [-1]
    assert await partial_keys(broker) == []


async def test_the_memory_is_freed_when_a_rollout_is_given_up_or_the_run_ends(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = new_broker("broker.max_deliveries=1")
    await broker.publish_policy(broker_rig.manifest(0))
    leased = (await broker.lease_tasks(GEN, 8, 0)).tasks
    assert len(leased) == 8
    await broker.partials.keep(GEN, [piece(item, 0, 30) for item in leased[:5]])
    await broker_rig.impatient_sweep(broker)
    assert (await broker.status()).ledger.abandoned == 8
    assert await partial_keys(broker) == []
    item = await lease(broker)
    await broker.partials.keep(GEN, [piece(item, 0, 30)])
    await broker.finish_run("enough")
    assert await partial_keys(broker) == []


async def test_tokens_too_old_for_every_batch_end_the_group_and_are_freed(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = new_broker("broker.max_staleness=0")
    await broker.publish_policy(broker_rig.manifest(0))
    stale, other, *_ = (await broker.lease_tasks(GEN, 4, 0)).tasks
    await broker.partials.keep(GEN, [piece(stale, 0, 10)])
    await broker.publish_policy(broker_rig.manifest(1))
    assert await broker.partials.keep(GEN, [piece(stale, 13, 20), piece(other, 0, 10, version=1)]) == [-1, -1]
    lost = await broker.heartbeat(GEN, [stale.lease.lease_id, other.lease.lease_id])
    assert set(lost.values()) == {LeaseLoss.STALE}
    status = await broker.status()
    assert (status.ledger.stale, status.ledger.balanced, await partial_keys(broker)) == (4, True, [])


async def test_tokens_survive_a_restart_of_the_broker(new_broker: NewBroker, broker: Broker) -> None:
    first = await lease(broker)
    await broker.partials.keep(GEN, [piece(first, 0, 30)])
    again = new_broker(config=broker._config)
    assert await again.partials.keep(GEN, [piece(first, 33, 35)]) == [38]
    await again.release_leases(GEN)
    assert (await lease(again, OTHER)).num_kept_tokens == 38


async def test_tokens_of_a_policy_that_redis_does_not_know_are_not_kept(broker: Broker) -> None:
    item = await lease(broker)
    assert await broker.partials.keep(GEN, [piece(item, 0, 10, version=1)]) == [-1]
    assert await partial_keys(broker) == []


async def test_a_full_redis_takes_no_tokens_and_goes_on_with_the_rest(broker: Broker, broker_rig: Any) -> None:
    item = await lease(broker)
    broker.memory.pressure = Pressure(used=80, limit=100)
    with pytest.raises(RedisFull, match="no group is admitted"):
        await broker.partials.keep(GEN, [piece(item, 0, 10)])
    assert await broker.submit_rollouts(GEN, [broker_rig.sampled(item)]) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lease_id": "batches:1:1:0"}, "not on tasks"),
        ({"lease_id": "nonsense"}, "not a lease"),
        ({"end_token": 0}, "a piece of 0 tokens"),
        ({"data": b"short"}, "does not have 5 bytes"),
        ({"oldest_version": 1}, "newer than its newest"),
    ],
)
async def test_a_piece_that_cannot_be_true_is_refused_in_words(
    broker: Broker, changes: dict[str, Any], says: str
) -> None:
    item = await lease(broker)
    values = {name: getattr(piece(item, 0, 10), name) for name in EncodedPiece.__slots__}
    with pytest.raises(InvalidRequest, match=says):
        await broker.partials.keep(GEN, [EncodedPiece(**(values | changes))])
    with pytest.raises(InvalidRequest, match="not a rollout of this broker"):
        await broker.partials.read("../record:x")
