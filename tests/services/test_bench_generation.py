"""The bench of generation runs for real on a small load; no speed is asserted."""

from __future__ import annotations

import pytest

from nouscoder.bench.generation import as_text, bench_generation
from nouscoder.bench.measuring import as_record


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_the_bench_samples_through_a_real_broker_and_a_real_service() -> None:
    result = await bench_generation("torch", seconds=4.0, overrides=("generation.max_running=8",))
    assert result.max_running == 8
    assert min(result.offline_tokens_per_second) > 0
    assert len(result.offline_tokens_per_second) == len(result.steady) == len(result.updating) == 3
    for window in (*result.steady, *result.updating, result.slow_verifier, result.second_worker.both):
        assert window.seconds >= 4.0
        assert window.tokens_per_second > 0
        assert 0 < window.busy_share <= 1
        assert 0 < window.running_share <= 1
    assert all(window.num_updates for window in result.updating)
    assert not any(window.num_updates for window in result.steady[:1]), "nothing is published before the first update"
    assert (result.second_worker.rollouts_lost, result.second_worker.balanced) == (0, True)
    record = as_record(result)
    assert record["share_of_offline"] == result.share_of_offline > 0
    assert "of the engine alone" in as_text(result)
