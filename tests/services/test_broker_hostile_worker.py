"""What a worker with a stolen certificate can change at the broker, and what not: SECURITY.md, "A stolen worker"."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from nouscoder.broker.process import serve_broker
from nouscoder.domain.verdict import VerdictKind
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerRefused

Connect = Callable[[str], Any]


@pytest.fixture
async def connect(broker_rig: Any) -> AsyncIterator[Connect]:
    """Clients of a real broker over gRPC whose policy is published."""
    config = broker_rig.config("broker.grpc=127.0.0.1:0")
    broker = broker_rig.broker(config)
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker, config, asyncio.Event(), stack)

        async def made(name: str) -> BrokerClient:
            return await stack.enter_async_context(BrokerClient(address, name, patience_s=2))

        await broker.publish_policy(broker_rig.manifest(0))
        yield made


async def test_only_the_holder_of_a_lease_submits_and_only_once(connect: Connect, broker_rig: Any) -> None:
    honest, thief = await connect("generation-h-0-1"), await connect("generation-thief-0-1")
    mine, other = (await honest.lease_tasks(2)).tasks
    stolen = broker_rig.rollout(mine.task)
    guessed = [mine.lease.lease_id + "0", mine.lease.lease_id[:-1], other.lease.lease_id, "0-0", ""]
    for lease in guessed:
        try:
            lost = await thief.submit_rollouts([(lease, stolen)])
        except PeerRefused:
            continue
        assert lost, lease
    assert (await honest.status()).rollouts_graded == 0
    assert await honest.submit_rollouts([(mine.lease.lease_id, stolen)]) == frozenset()
    await thief.submit_rollouts([(mine.lease.lease_id, stolen)])
    assert len((await honest.lease_grading(9)).gradings) == 1, "the second submission is no second rollout"


async def test_a_verdict_counts_only_for_the_rollout_of_its_lease_and_the_ledger_balances(
    connect: Connect, broker_rig: Any
) -> None:
    generation, thief = await connect("generation-h-0-1"), await connect("verifier-thief-0-1")
    tasks = (await generation.lease_tasks(2)).tasks
    await generation.submit_rollouts([(one.lease.lease_id, broker_rig.rollout(one.task)) for one in tasks])
    first, second = (await thief.lease_grading(2)).gradings
    accepted = broker_rig.verdict(VerdictKind.ACCEPTED)
    with suppress(PeerRefused):
        assert await thief.submit_verdicts([(first.lease.lease_id, second.rollout_id, accepted)])
    assert (await generation.status()).rollouts_graded == 0
    assert await thief.submit_verdicts([(first.lease.lease_id, first.rollout_id, accepted)]) == frozenset()
    await thief.submit_verdicts([(first.lease.lease_id, first.rollout_id, accepted)])
    status = await generation.status()
    assert (status.rollouts_graded, status.ledger.balanced) == (1, True), "a verdict is believed, and counts once"
