"""AdamW with 8-bit moments: the error of a block is bounded, rounding is right on average, and it trains as float32."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nouscoder.learner.adamw_8bit import BLOCK, AdamW8bit, dequantise, levels, num_blocks, quantise
from nouscoder.learner.optimizer import put_states

BETAS, RATE, DECAY = (0.9, 0.99), 2e-2, 0.05


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def levels_by_hand(*, signed: bool) -> list[float]:
    """Dettmers et al. 2110.02861 and its published program: middles of equal parts of each factor of 10."""
    found = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade + (0 if signed else 1))
        for part in range(parts):
            low, high = 0.1 + 0.9 * part / parts, 0.1 + 0.9 * (part + 1) / parts
            level = (low + high) / 2 * 10 ** (decade - 6)
            found += [level, -level] if signed else [level]
    return sorted(found)


@pytest.mark.parametrize("signed", [True, False])
def test_there_are_256_levels(signed: bool) -> None:
    table = levels(signed=signed)
    assert table.dtype is torch.float32
    torch.testing.assert_close(table.double(), torch.tensor(levels_by_hand(signed=signed), dtype=torch.float64))
    assert len(set(table.tolist())) == 256


def quantised(values: Tensor, *, signed: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    scales = torch.zeros(len(values), num_blocks(values.shape))
    quantise(values, codes, scales, signed=signed, chance=torch.Generator().manual_seed(seed))
    return codes, scales


@given(st.integers(1, 2), st.integers(1, 280), st.booleans(), st.integers(0, 2**16), st.floats(-12, 3, allow_nan=False))
@settings(deadline=None, max_examples=12)
def test_each_number_becomes_one_of_the_two_levels_around_it(
    rows: int, width: int, signed: bool, seed: int, magnitude: float
) -> None:
    chance = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, width, generator=chance) * 3  # of the exponents: values over many factors of 10
    values = torch.randn(rows, width, generator=chance) * spread.exp() * 10**magnitude
    values = values if signed else values.abs()
    codes, scales = quantised(values, signed=signed, seed=seed)
    found, table = dequantise(codes, scales, signed=signed), levels_by_hand(signed=signed)
    for row in range(rows):
        for column in range(width):
            block = values[row, column // BLOCK * BLOCK : (column // BLOCK + 1) * BLOCK]
            scale = float(block.abs().max())
            share, got = float(values[row, column]) / scale, float(found[row, column]) / scale
            slop = 1e-5 * abs(share)
            below = max((level for level in table if level <= share - slop), default=table[0])
            above = min((level for level in table if level >= share + slop), default=table[-1])
            assert below * (1 - 1e-5 * math.copysign(1, below)) <= got <= above * (1 + 1e-5 * math.copysign(1, above))
            assert abs(got - share) <= 0.0142, "the widest distance of two levels"
            if not signed and share > 0:
                assert got > 0


def test_rounding_is_right_on_average() -> None:
    values = torch.linspace(-0.9, 0.9, BLOCK).repeat(4000, 1)
    values[:, 0] = 1.0  # the scale of every block
    mean = dequantise(*quantised(values, signed=True), signed=True).double().mean(0)
    # The standard error of 4000 draws between two levels 0.0142 apart is at most 1.2e-4; the bound is six times that.
    assert float((mean - values[0].double()).abs().max()) < 7e-4


def test_a_block_of_zeros_stays_zero() -> None:
    codes, scales = quantised(torch.zeros(2, 300), signed=False)
    assert not dequantise(codes, scales, signed=False).any()


def train(weight: Tensor, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, steps: int) -> float:
    """Least squares, a different quarter of the rows in each step. Returns the final loss over all rows."""
    for step in range(steps):
        optimizer.zero_grad()
        rows = slice(step % 4, None, 4)
        torch.autograd.backward(((inputs[rows] @ weight.T - targets[rows]) ** 2).mean())
        optimizer.step()
    return float(((inputs @ weight.T - targets) ** 2).mean().detach())


def test_the_loss_falls_as_with_float32_moments() -> None:
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 600, generator=chance) * torch.logspace(-2, 0, 600)  # gradients of many magnitudes
    targets = inputs @ torch.randn(600, 32, generator=chance) + 0.1 * torch.randn(256, 32, generator=chance)
    losses = {}
    for name in ("float32", "8bit"):
        weight = nn.Parameter(torch.zeros(32, 600))
        optimizer: torch.optim.Optimizer = (
            AdamW8bit([weight], RATE, BETAS, 0.0)
            if name == "8bit"
            else torch.optim.AdamW([weight], RATE, BETAS, weight_decay=0.0)
        )
        losses[name] = [train(weight, optimizer, inputs, targets, 25) for _ in range(4)]
    begin = float((targets**2).mean())
    assert losses["float32"][-1] < begin / 20, "the problem can be learned"
    for exact, found in zip(losses["float32"], losses["8bit"], strict=True):
        assert abs(math.log(found / exact)) < 0.1, losses


def test_the_first_step_and_all_steps_of_vectors_are_those_of_torch() -> None:
    chance = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(8, 300, generator=chance), torch.randn(300, generator=chance)
    ours = [nn.Parameter(matrix.clone()), nn.Parameter(vector.clone())]
    theirs = [nn.Parameter(matrix.clone()), nn.Parameter(vector.clone())]
    small = AdamW8bit(ours, RATE, BETAS, DECAY)
    exact = torch.optim.AdamW(theirs, RATE, BETAS, weight_decay=DECAY)
    for step in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=chance)
            other.grad = one.grad.clone()
        small.step()
        exact.step()
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-7)
        if step == 0:
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)
    difference, moved = ours[0].detach() - theirs[0].detach(), theirs[0].detach() - matrix
    assert float(difference.abs().mean() / moved.abs().mean()) < 0.05


def test_moments_take_little_more_than_two_bytes_a_weight() -> None:
    weight = nn.Parameter(torch.zeros(64, 1024))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW8bit([weight], RATE, BETAS, 0.0)
    optimizer.step()
    assert sum(tensor.nbytes for tensor in optimizer.state[weight].values()) == 64 * (2 * 1024 + 2 * 4 * 4) + 4


@pytest.mark.parametrize("fused", [True, False])
def test_the_number_of_the_step_is_where_the_kernel_reads_it(fused: bool) -> None:
    """On the device of the weight for a fused kernel, as torch begins with; on the CPU for others."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2, device="meta"))])
    optimizer.param_groups[0]["fused"] = fused
    put_states(optimizer, {0: {"step": torch.ones(()), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}})
    (state,) = optimizer.state.values()
    assert state["step"].device.type == ("meta" if fused else "cpu")
    assert state["exp_avg"].device.type == "meta"
