"""The bench of the gateway loads a real service whose slots sleep. Speed is not checked."""

from __future__ import annotations

import pytest

from nouscoder.bench.errors import BenchError
from nouscoder.bench.gateway import as_record, as_text, bench_gateway, slot_numbers


async def test_the_bench_loads_a_real_gateway_with_slots_that_sleep() -> None:
    result = await bench_gateway([1, 3], seconds=0.3, sleep_s=0.001)
    assert [(one.slots, one.tests_a_submission) for one in result.loads] == [(1, 1), (1, 20), (3, 1), (3, 20)]
    for one in result.loads:
        assert 0 < one.submissions_per_second <= one.slots_per_second
        assert one.gateway_cpu_ms > 0
    assert as_record(result)["loads"][0]["slots"] == 1
    assert f"{result.loads[0].gateway_cpu_ms:8.2f} ms" in as_text(result)


@pytest.mark.parametrize("text", ["0", "-1", "1,,2", "a", "1,257", "²"])
def test_other_words_than_numbers_of_slots_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--simulate-slots takes numbers"):
        slot_numbers(text)


def test_numbers_of_slots_are_read() -> None:
    assert slot_numbers("1, 2,16") == [1, 2, 16]
