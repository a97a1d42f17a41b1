"""The header of a rollout is converted at most five times on its way from generation to a saved batch.

Once each: by generation into bytes, by the broker when it takes the rollout, by the verifier's client for the place of
the text, by the broker for the reward, and by the learner's client. In between, and on the disks, the bytes stay.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from nouscoder.broker.process import serve_broker
from nouscoder.domain.batch import Batch
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.convert import WirePair
from nouscoder.rpc.pairs import BATCH, HEADER, VERDICT
from nouscoder.store.record_store import ByteRange

NUM_ROLLOUTS = 8


async def life_of_a_batch(broker_rig: Any, folder: Path) -> Batch:
    """Take a batch through all services, and load it from the learner's disk."""
    config = broker_rig.config("broker.grpc=127.0.0.1:0")
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker_rig.broker(config), config, asyncio.Event(), stack)
        generation, verifier, learner = [
            await stack.enter_async_context(BrokerClient(address, f"{name}-h-0-1"))
            for name in ("generation", "verifier", "learner")
        ]
        await learner.publish_policy(broker_rig.manifest(0))
        tasks = (await generation.lease_tasks(NUM_ROLLOUTS)).tasks
        await generation.submit_rollouts([(item.lease.lease_id, broker_rig.rollout(item.task)) for item in tasks])
        gradings = (await verifier.lease_grading(NUM_ROLLOUTS)).gradings
        await verifier.submit_verdicts(
            [
                (item.lease.lease_id, item.rollout_id, broker_rig.verdict(broker_rig.mixed(item.rollout_id)))
                for item in gradings
            ]
        )
        leased = (await learner.lease_batch()).batch
        assert leased is not None
        assert len(leased.rollouts) == NUM_ROLLOUTS
        assert leased.index == BATCH.encode(leased), "what the broker sent is what this program would write"
        ranges = [ByteRange(recorded.record, 0, recorded.header.record_bytes) for recorded in leased.rollouts]

        async def records() -> AsyncIterator[bytes]:
            async for _, data in learner.stream_records(ranges):
                yield data

        saved = SavedBatches(folder, keep=2)
        await saved.save(leased, records())
        return saved.load(leased.batch_id)


async def test_a_header_is_converted_at_most_five_times(
    broker_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[tuple[str, Any]] = Counter()
    for name in ("to", "of"):
        inner = getattr(WirePair, name)

        def counted(self: Any, *values: Any, _name: str = name, _inner: Any = inner, **given: Any) -> Any:
            calls[_name, self] += 1
            return _inner(self, *values, **given)

        monkeypatch.setattr(WirePair, name, counted)
    batch = await life_of_a_batch(broker_rig, tmp_path)
    # The assertion in life_of_a_batch encodes each header and verdict once more.
    of_header = (calls["to", HEADER] - NUM_ROLLOUTS, calls["of", HEADER])
    assert of_header == (1 * NUM_ROLLOUTS, 4 * NUM_ROLLOUTS)
    of_verdict = (calls["to", VERDICT] - NUM_ROLLOUTS, calls["of", VERDICT])
    assert of_verdict == (2 * NUM_ROLLOUTS, 3 * NUM_ROLLOUTS)
    assert [graded.verdict.kind for graded in batch.rollouts] == [
        broker_rig.mixed(graded.rollout.rollout_id) for graded in batch.rollouts
    ]
