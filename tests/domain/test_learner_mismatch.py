"""The figures of the mismatch between sampler and learner, against plain loops, however the step is divided."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from nouscoder.learner.metrics.diagnostics import StepDiagnostics
from nouscoder.learner.metrics.mismatch import POSITIONS, VERSIONS, MismatchFigures, positions_in_rollouts
from nouscoder.objectives.base import LossInputs


def inputs_of(rollouts: list[list[float]], num_versions: list[int] | None = None) -> LossInputs:
    """Loss tokens of rollouts; each number is log pi_old - log pi_sampler of a token."""
    differences = torch.tensor([value for rollout in rollouts for value in rollout])
    numbers = torch.tensor([number for number, rollout in enumerate(rollouts) for _ in rollout])
    sampler = torch.full_like(differences, -30.0)
    same = torch.zeros_like(differences)
    old = sampler + differences
    versions = None if num_versions is None else torch.tensor(num_versions)[numbers]
    return LossInputs(old, old, sampler, same, numbers, same, same.bool(), num_versions=versions)


def test_the_figures_are_those_of_plain_loops() -> None:
    draw = random.Random(3)
    lengths = [1, 40, 700, 5000, 20_000]
    rollouts = [[draw.gauss(0, 0.3) for _ in range(length)] for length in lengths]
    sizes = sorted(abs(value) for rollout in rollouts for value in rollout)
    wanted = {
        "mismatch_abs_mean": sum(sizes) / len(sizes),
        "mismatch_abs_p99": sizes[math.ceil(0.99 * len(sizes)) - 1],
        "mismatch_beyond_2x": sum(size > math.log(2) for size in sizes) / len(sizes),
    }
    for first, end in zip(POSITIONS, (*POSITIONS[1:], math.inf), strict=True):
        inside = [value for rollout in rollouts for at, value in enumerate(rollout) if first <= at < end]
        wanted[f"mismatch_kl_at_{first}"] = sum(math.exp(value) - 1 - value for value in inside) / len(inside)

    whole, divided = MismatchFigures(), MismatchFigures()
    whole.add(inputs_of(rollouts))
    for part in (rollouts[:2], rollouts[2:4], rollouts[4:]):
        divided.add(inputs_of(part))
    # -30 + d is rounded to float32.
    assert whole.result() == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert divided.result() == pytest.approx(whole.result(), rel=1e-9)


def test_a_sampler_with_the_same_probabilities_has_no_mismatch() -> None:
    figures = MismatchFigures()
    figures.add(inputs_of([[0.0] * 10, [0.0] * 100]))
    assert figures.result() == {
        **dict.fromkeys(("mismatch_abs_mean", "mismatch_abs_p99", "mismatch_beyond_2x"), 0.0),
        **dict.fromkeys(("mismatch_kl_at_0", "mismatch_kl_at_64"), 0.0),
    }


def test_the_divergence_is_that_of_the_rollouts_with_as_many_versions() -> None:
    draw = random.Random(4)
    num_versions = [1, 2, 1, 4, 7]
    rollouts = [[draw.gauss(0, 0.2) for _ in range(30)] for _ in num_versions]
    figures = MismatchFigures()
    figures.add(inputs_of(rollouts[:2], num_versions[:2]))
    figures.add(inputs_of(rollouts[2:], num_versions[2:]))
    found = {name: value for name, value in figures.result().items() if "versions" in name}
    wanted = {}
    for first, end in zip(VERSIONS, (*VERSIONS[1:], math.inf), strict=True):
        pairs = zip(rollouts, num_versions, strict=True)
        inside = [value for rollout, number in pairs if first <= number < end for value in rollout]
        if inside:
            wanted[f"mismatch_kl_versions_{first}"] = sum(math.exp(x) - 1 - x for x in inside) / len(inside)
    assert sorted(wanted) == [f"mismatch_kl_versions_{number}" for number in (1, 2, 4)]
    # -30 + d is rounded to float32.
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_positions_begin_again_in_each_rollout() -> None:
    assert positions_in_rollouts(torch.tensor([0, 0, 0, 2, 2, 3])).tolist() == [0, 1, 2, 0, 1, 0]


def test_every_step_has_the_figures() -> None:
    diagnostics = StepDiagnostics()
    diagnostics.add(inputs_of([[0.0, 0.7, -0.7, 0.8]]), {})
    figures = diagnostics.result()
    assert figures["mismatch_beyond_2x"] == 0.75
    assert figures["mismatch_kl"] == pytest.approx(figures["mismatch_kl_at_0"], rel=1e-5)


def test_the_figures_of_fresh_rollouts_leave_the_others_out() -> None:
    rollouts = [[0.1, -0.3], [5.0] * 10, [0.2]]
    figures = MismatchFigures()
    inputs = inputs_of(rollouts)
    figures.add(replace(inputs, is_fresh=torch.tensor([True, False, True])[inputs.rollout_of_token]))
    found = figures.result()
    assert found["mismatch_fresh_abs_mean"] == pytest.approx(0.2, rel=1e-3)
    wanted = sum(math.exp(x) - 1 - x for x in (0.1, -0.3, 0.2)) / 3
    assert found["mismatch_fresh_kl"] == pytest.approx(wanted, rel=1e-3)
    none = MismatchFigures()
    none.add(replace(inputs, is_fresh=torch.zeros(len(inputs.rollout_of_token), dtype=torch.bool)))
    assert not any("fresh" in name for name in none.result())
