"""The learner's bench runs for real on a tiny load, and its controls do the same work; no speed is asserted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nouscoder.bench.learner import (
    LearnerLoad,
    as_text,
    bare_alone,
    bare_packed,
    batch_of,
    bench_learner,
    policy_of,
)
from nouscoder.bench.measuring import as_record
from nouscoder.learner.model.packing import input_lengths
from nouscoder.learner.model.synthetic import random_batch

TINY = LearnerLoad(hidden_size=32, num_layers=2, vocabulary=128, prompt_tokens=8, max_tokens=24, row_tokens=128)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def gradient(model: PreTrainedModel) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def test_both_controls_compute_the_same_gradient() -> None:
    model, rollouts = policy_of(TINY), [graded.rollout for graded in batch_of(TINY).rollouts]
    bare_alone(model, rollouts)
    alone = gradient(model)
    bare_packed(model, rollouts, TINY.row_tokens)
    assert alone.norm() > 0
    assert (gradient(model) - alone).norm() < 1e-5 * alone.norm()


def test_the_bench_measures_a_step_a_batch_and_both_controls() -> None:
    result = bench_learner(num_rounds=1, load=TINY)
    expected = random_batch(0, seed=0, num_groups=4, group_size=4, prompt_tokens=8, max_tokens=24)
    assert result.num_tokens == sum(input_lengths([graded.rollout for graded in expected.rollouts]))
    assert result.num_rollouts == 16
    fastest = max(result.alone_tokens_per_second, result.packed_tokens_per_second)
    assert result.step_share == pytest.approx(result.step_tokens_per_second / fastest)
    assert result.batch_share == pytest.approx(result.batch_tokens_per_second / fastest)
    assert result.batch_tokens_per_second > 0
    assert as_record(result)["num_parameters"] == policy_of(TINY).num_parameters()
    assert "of the faster bare pass" in as_text(result)
