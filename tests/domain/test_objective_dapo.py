"""DAPO equals a formula written by hand, and does not depend on the division of a minibatch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nouscoder.objectives.base import LossInputs, MinibatchCounts, bounded_ratio
from nouscoder.objectives.dapo import Dapo
from nouscoder.objectives.loss import SurrogateLoss


@dataclass(frozen=True)
class Token:
    """One token: its three log-probabilities and its rollout's advantage."""

    new: float
    old: float
    sampler: float
    advantage: float


def reference(
    token: Token, num_tokens: int, low: float = 0.2, high: float = 0.28, cap: float = 2.0
) -> tuple[float, float]:
    """The loss of one token and its derivative by the new log-probability, in plain arithmetic."""
    ratio = math.exp(token.new - token.old)
    weight = min(cap, math.exp(token.old - token.sampler))
    unclipped = ratio * token.advantage
    clipped = max(1 - low, min(1 + high, ratio)) * token.advantage
    gain = min(unclipped, clipped)
    slope = unclipped if unclipped <= clipped else 0.0  # d ratio / d logprob = ratio; the clip's side is flat
    return -weight * gain / num_tokens, -weight * slope / num_tokens


def run(
    tokens: list[Token], counts: MinibatchCounts | None = None
) -> tuple[float, list[float], torch.Tensor, torch.Tensor]:
    new = torch.tensor([t.new for t in tokens], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logprobs=new,
        old_logprobs=torch.tensor([t.old for t in tokens], dtype=torch.float64),
        sampler_logprobs=torch.tensor([t.sampler for t in tokens], dtype=torch.float64),
        advantages=torch.tensor([t.advantage for t in tokens], dtype=torch.float64),
        rollout_of_token=torch.arange(len(tokens)),
        entropies=torch.zeros(len(tokens), dtype=torch.float64),
        accepted=torch.zeros(len(tokens), dtype=torch.bool),
    )
    terms = SurrogateLoss(Dapo())(inputs, counts or MinibatchCounts(len(tokens), len(tokens), 0))
    torch.autograd.backward(terms.loss)
    assert new.grad is not None
    clipped = [terms.diagnostics[f"clip_fraction_{side}"].values for side in ("low", "high")]
    return float(terms.loss.detach()), new.grad.tolist(), clipped[0], clipped[1]


CASES = {
    "inside the clip": Token(-1.0, -1.1, -1.1, 1.0),
    "above the high clip, good": Token(-1.0, -1.5, -1.5, 1.0),
    "above the high clip, bad": Token(-1.0, -1.5, -1.5, -1.0),
    "below the low clip, bad": Token(-1.5, -1.0, -1.0, -1.0),
    "below the low clip, good": Token(-1.5, -1.0, -1.0, 1.0),
    "between 1.2 and 1.28, good": Token(-1.0, -1.22, -1.22, 1.0),
    "sampler far below: weight capped": Token(-1.0, -1.1, -3.0, 0.7),
    "sampler above: weight below 1": Token(-1.0, -1.1, -0.4, -0.7),
    "overlong: advantage 0": Token(-1.0, -2.0, -2.0, 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_each_token_has_the_loss_and_gradient_of_the_formula(name: str) -> None:
    loss, gradient, _, _ = run([CASES[name]])
    expected_loss, expected_slope = reference(CASES[name], 1)
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    assert gradient[0] == pytest.approx(expected_slope, rel=1e-9)


def test_the_clip_removes_the_gradient_only_at_its_own_side() -> None:
    _, gradient, low, high = run(list(CASES.values()))
    flat = dict(zip(CASES, gradient, strict=True))
    assert {name for name, slope in flat.items() if slope == 0} == {
        "above the high clip, good",
        "below the low clip, bad",
        "overlong: advantage 0",
    }, "a ratio between 1.2 and 1.28 is inside: the high clip is 0.28"
    assert [name for name, hit in zip(CASES, low.tolist(), strict=True) if hit] == ["below the low clip, bad"]
    assert [name for name, hit in zip(CASES, high.tolist(), strict=True) if hit] == ["above the high clip, good"]


def test_truncated_importance_weight_is_a_factor_without_gradient_and_outside_the_clip() -> None:
    plain, capped = Token(-1.0, -1.5, -1.5, 1.0), Token(-1.0, -1.5, -9.0, 1.0)
    assert run([capped])[0] == pytest.approx(2.0 * run([plain])[0]), "C = 2 times a clipped gain"
    old = torch.tensor([-1.5], requires_grad=True)
    one = torch.ones(1)
    inputs = LossInputs(-one, old.detach(), -2 * one, one, torch.zeros(1).long(), one, one.bool())
    assert not SurrogateLoss(Dapo())(inputs, MinibatchCounts(1, 1, 0)).loss.requires_grad


def test_tokens_of_overlong_rollouts_count_in_the_denominator() -> None:
    token, overlong = CASES["inside the clip"], CASES["overlong: advantage 0"]
    assert run([token, overlong])[0] == pytest.approx(run([token])[0] / 2)


log_probabilities = st.floats(-30.0, 0.0)
some_tokens = st.lists(
    st.builds(Token, log_probabilities, log_probabilities, log_probabilities, st.floats(-3.0, 3.0)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(some_tokens, st.integers(0, 12))
def test_micro_batches_add_up_to_the_minibatch(tokens: list[Token], cut: int) -> None:
    cut = min(cut, len(tokens))
    counts = MinibatchCounts(len(tokens), len(tokens), 0)
    whole_loss, whole_gradient, _, _ = run(tokens, counts)
    parts = [part for part in (tokens[:cut], tokens[cut:]) if part]
    results = [run(part, counts) for part in parts]
    assert sum(result[0] for result in results) == pytest.approx(whole_loss, rel=1e-9, abs=1e-12)
    assert [slope for result in results for slope in result[1]] == pytest.approx(whole_gradient)


@settings(max_examples=60)
@given(some_tokens)
def test_loss_and_gradient_stay_finite_for_any_log_probabilities(tokens: list[Token]) -> None:
    loss, gradient, _, _ = run(tokens)
    assert math.isfinite(loss)
    assert all(math.isfinite(slope) for slope in gradient)


def test_the_ratio_is_bounded() -> None:
    extreme = bounded_ratio(torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0]))
    assert torch.isfinite(extreme).all()
    assert extreme[0] == pytest.approx(math.exp(20), rel=1e-5)
