"""The bench runs with a real service and compares every figure with its control. Speed is not checked."""

from __future__ import annotations

import os

import pytest

from nouscoder.bench.controls import Floor, SlotClocks, cost_of
from nouscoder.bench.measuring import as_record, usage_of
from nouscoder.bench.verifier import as_text, bench_verifier


@pytest.mark.heavy
async def test_the_bench_measures_a_real_service_and_its_control() -> None:
    result = await bench_verifier(scale=0.04, control_s=0.1)
    many, single = result.many_small_tests, result.one_test_submissions
    assert result.backend == "local"
    for block in (many, single):
        assert block.multiple == block.tests_per_second_per_core / block.bare_spawns_per_second
        assert block.tests_per_second_per_core > 0
        assert 0 < block.gateway_cpu_share < 1
    assert 0 < result.latency_at_half_load.p50_s <= result.latency_at_half_load.p99_s
    assert result.peak_memory_bytes > 10 << 20
    assert result.warm_forks_per_second > 0
    cost = result.one_test_cost
    assert cost is not None
    assert min(cost.gateway_ms, cost.interpreter_ms, cost.candidate_ms, cost.client_ms, cost.floor.program_ms) > 0
    assert as_record(result)["one_test_of_floor"] == cost.of_floor
    assert cost.of_floor == cost.service_ms / cost.floor.total_ms
    assert f"the service takes {cost.of_floor:.2f}x the floor" in as_text(result)
    assert 0 <= result.stolen_cpu_share < 1
    assert as_record(result)["many_small_tests"]["multiple"] == many.multiple
    assert f"{many.multiple:.2f}x bare spawns" in as_text(result)


def test_a_cost_is_the_difference_of_two_readings_for_each_submission() -> None:
    before, after = SlotClocks(1.0, 2.0, 3.0), SlotClocks(1.2, 2.1, 3.6)
    floors = [Floor(1.0, 2.0, 9.0), Floor(1.0, 3.0, 4.0), Floor(8.0, 2.0, 4.0)]
    cost = cost_of(before, after, submissions=100, candidates_s=0.2, client_s=0.03, floors=floors)
    parts = (cost.gateway_ms, cost.interpreter_ms, cost.init_ms, cost.candidate_ms, cost.client_ms)
    assert parts == pytest.approx((2.0, 1.0, 4.0, 2.0, 0.3))
    assert cost.floor == Floor(1.0, 2.0, 4.0)
    assert cost.service_ms == pytest.approx(9.0)
    assert cost.of_floor == pytest.approx(9.0 / 7.0)


def test_usage_counts_a_process_and_its_descendants() -> None:
    child = os.fork()
    if not child:
        try:
            os.read(0, 0)
            while True:
                os.getpid()
        finally:
            os._exit(0)
    try:
        assert usage_of(os.getpid()).memory_bytes > usage_of(child).memory_bytes > 0
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
