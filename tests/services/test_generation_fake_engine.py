"""The fake engine's scripts: how long its completions and its steps are."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from nouscoder.config import load_config
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines import step_engine
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.generation.engines.fake import script_of

STOP = 2


def request_of(number: int) -> SampleRequest:
    return SampleRequest(f"r{number}", (1, 5, 6, 7), Sampling(max_new_tokens=10_000, seed=number), frozenset({STOP}))


def test_lengths_are_log_normal_around_the_median_and_follow_from_the_request() -> None:
    script = script_of(200, 0.5)
    lengths = [len(script(request_of(number))) for number in range(2000)]
    assert statistics.median(lengths) == pytest.approx(200, rel=0.05)
    shares = statistics.quantiles(lengths, n=100)
    assert shares[83] / statistics.median(lengths) == pytest.approx(2.718**0.5, rel=0.1), "one sigma above"
    assert script(request_of(7)) == script(request_of(7))
    assert STOP not in script(request_of(7))
    assert script_of(0, 0.5)(request_of(7)) != script(request_of(7))


def test_the_configuration_sets_lengths_and_the_duration_of_a_step(tmp_path: Path) -> None:
    settings = ["engine=fake", "fake.step_s=0.01", "fake.median_tokens=20", "max_tokens_total=100"]
    engine = step_engine(load_config(None, [f"generation.{setting}" for setting in settings]), tmp_path)
    weights = tmp_path / "weights"
    weights.write_bytes((8).to_bytes(8, "little") + bytes(8))
    engine.load_policy([weights], 0)
    engine.add(request_of(1))
    begun_s, ended = time.monotonic(), list[tuple[str, Completion]]()
    while not ended:
        ended = engine.step()
    assert len(ended[0][1].token_ids) == 21, "twenty and the stop token"
    assert time.monotonic() - begun_s >= 21 * 0.01
