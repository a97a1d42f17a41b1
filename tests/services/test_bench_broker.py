"""The broker's bench runs for real on a small load; no speed is asserted."""

from __future__ import annotations

import pytest

from nouscoder.bench import broker_many
from nouscoder.bench.broker import as_text, bench_broker
from nouscoder.bench.measuring import as_record

pytestmark = pytest.mark.alone


@pytest.mark.heavy
@pytest.mark.timeout(300)
async def test_the_bench_takes_rollouts_through_a_real_broker_process() -> None:
    result = await bench_broker(batch=32, scale=0.01)
    assert [life.num_tokens for life in result.whole_lives] == [64, 8192, 32768]
    for life in result.whole_lives:
        assert life.record_bytes > 8 * life.num_tokens
        assert min(life.rollouts_per_second, life.redis_control_ms, life.protobuf_control_cpu_ms) > 0
    large = result.large_batch
    assert large.batch_bytes > 32 * 8 * 32768
    assert large.redis_bytes_full - large.redis_bytes_before > large.batch_bytes
    assert large.redis_bytes_after - large.redis_bytes_before < large.batch_bytes / 4
    assert (large.leases_beaten, large.leases_lost) == (32, 0)
    assert 0 < large.heartbeat_p50_s <= large.heartbeat_p99_s
    for flow in result.flows:
        assert flow.record_bytes > 8 * flow.throughput.load.num_tokens
        assert flow.share_of_redis > 0
    assert [each.load.num_workers for each in result.throughputs] == [4, 128]
    assert all(each.cpu_ms_a_rollout > 0 and each.redis_commands_a_rollout > 10 for each in result.throughputs)
    assert result.idle.num_workers == 256
    assert as_record(result)["large_batch"]["num_rollouts"] == 32
    assert "0 of 32 leases lost" in as_text(result)


@pytest.mark.timeout(300)
async def test_many_rollouts_are_measured_at_three_points() -> None:
    result = await broker_many.bench_many(320, num_problems=16, batch=32)
    assert [point.num_rollouts for point in result.points] == [32, 96, 320]
    assert [point.throughput.num_rollouts for point in result.points] == [32, 32, 32]
    for point in result.points:
        assert point.throughput.rollouts_per_second > 0
        assert point.broker_bytes > 0
        assert point.redis_bytes > point.statistics_bytes > 0
    assert result.points[-1].problems_with_statistics == 16
    assert "after 320 rollouts" in broker_many.as_text(result)
