"""A batch larger than one gRPC message may be goes through a broker process, and no worker loses a lease meanwhile."""

from __future__ import annotations

import pytest

from nouscoder.bench.broker import large_batch
from nouscoder.bench.broker_process import running_broker
from nouscoder.rpc.server import MAX_MESSAGE_BYTES

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300), pytest.mark.alone]


async def test_a_batch_of_896_rollouts_of_32k_tokens_is_leased_streamed_and_committed() -> None:
    """It was refused once (RESOURCE_EXHAUSTED), again and again, and the sweep took 256 live leases back."""
    async with running_broker(896, "broker.lease_s=5") as broker:
        batch = await large_batch(broker, 896)
    assert batch.batch_bytes > MAX_MESSAGE_BYTES, "the batch would have fitted in one message"
    assert (batch.leases_beaten, batch.leases_lost) == (256, 0)
    assert batch.redis_bytes_after - batch.redis_bytes_before < batch.batch_bytes // 100, "records stay in Redis"
    assert batch.broker_peak_rss_bytes < 300 * 1024**2
