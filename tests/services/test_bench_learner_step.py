"""The bench of a step on a device runs for real with a tiny policy on the CPU; no speed is asserted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nouscoder.bench.learner_step import StepLoad, bench_step, defaults, largest_context
from nouscoder.bench.measuring import BenchError, as_record
from nouscoder.bench.shaped_policy import SHAPES, shaped_batch, shaped_policy
from nouscoder.config import load_config
from nouscoder.errors import WrongUse
from nouscoder.learner.model.packing import input_lengths
from nouscoder.learner.parallel.operations import training_flops

LOAD = StepLoad("tiny", row_tokens=64, rows=2, sequences=4, rounds=1, context=True, limit_s=0.001)
GIB = 2**30


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.set_num_threads(threads)


def test_the_bench_measures_the_step_and_its_control_and_tells_as_it_goes() -> None:
    lines: list[str] = []
    overrides = [
        "learner.activation_checkpointing=attention",
        "learner.checkpointed_layers=1",
        "learner.peak_flops=1e9",
    ]
    result = bench_step(LOAD, load_config(None, [*defaults(LOAD), *overrides]), lines.append)
    assert result.lengths == (16,) * 8
    assert result.flops == training_flops(
        shaped_policy(SHAPES["tiny"], torch.device("cpu"), torch.float32), result.lengths
    )
    assert result.step.mfu == pytest.approx(result.flops / result.step.seconds / 1e9)
    assert result.step.tokens_per_second == pytest.approx(128 / result.step.seconds)
    assert result.share == pytest.approx(result.step.tokens_per_second / result.bare.tokens_per_second)
    assert result.context is not None
    assert result.context.fits == 64
    assert result.settings["activation_checkpointing"] == "attention"
    assert as_record(result)["context"]["tries"][0]["length"] == 64
    assert [line.split()[0] for line in lines] == [
        *("device", "policy", "batch"),
        *["bare"] * 3,
        *["step"] * 3,
        *("share", "context"),
    ]


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WrongUse, match=r"there is no shape large: choose one of tiny, qwen3-0\.6b"):
        bench_step(StepLoad("large"), load_config(None), print)
    with pytest.raises(BenchError, match=r"learner\.device is cuda, and this machine has no CUDA device"):
        bench_step(LOAD, load_config(None, ["learner.device=cuda"]), print)
    with pytest.raises(BenchError, match="a row of 64 tokens cannot have 65 rollouts"):
        bench_step(replace(LOAD, sequences=65), load_config(None), print)


def test_operations_are_those_of_weights_and_of_causal_attention() -> None:
    policy = shaped_policy(SHAPES["tiny"], torch.device("cpu"), torch.float32)
    of_weights = 6 * policy.num_parameters() * (10 + 20)
    # layers, heads, head size; twice (scores, values), forward and twice backward, half of the squares
    of_attention = 2 * 2 * 16 * (2 * 2 * 3) / 2 * (10**2 + 20**2)
    assert training_flops(policy, [10, 20]) == of_weights + of_attention


def test_rollouts_have_the_lengths_that_are_asked_for() -> None:
    batch = shaped_batch(128, [5, 400, 1])
    assert input_lengths([graded.rollout for graded in batch.rollouts]) == [5, 400, 1]
    assert [graded.reward for graded in batch.rollouts] == [1.0, -1.0, 1.0]


@pytest.mark.parametrize("limit", [70_000, 100_000, 131_072, 33_000])
def test_the_largest_context_is_found_in_few_tries(limit: int) -> None:
    """Memory is full at `limit` tokens."""
    capacity, weights = 140 * GIB, 68 * GIB
    a_token = (0.97 * capacity - weights) / limit

    def attempt(length: int) -> int | None:
        return int(max(weights + 3 * GIB, weights + length * a_token)) if length <= limit else None

    found = largest_context(attempt, capacity, 32768, 60.0, print)
    assert found.fits <= limit < found.fails
    assert found.fails - found.fits <= found.fails / 16
    assert len(found.tries) <= 8


def test_a_first_length_that_does_not_fit_is_halved() -> None:
    found = largest_context(lambda length: None if length > 5000 else length, 10**9, 32768, 60.0, print)
    assert (found.fits, found.fails) == (4096, 5120)


def test_the_search_ends_before_a_step_that_would_take_too_long() -> None:
    found = largest_context(lambda length: GIB, 140 * GIB, 32768, 0.0, print)
    assert (found.fits, found.fails, len(found.tries)) == (32768, 0, 1)
