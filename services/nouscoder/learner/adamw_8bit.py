"""AdamW with moments of 8 bits each, which take 2 bytes a weight in place of 8.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101. Each step reads the moments,
changes them in float32 by the formula of AdamW, changes the weight, and writes the moments back in 8 bits. The second
moment is stored as its square root. It then spans as many factors of 10 as the first, so no weight keeps its first
moment and loses the second, by which it is divided. Vectors (norms, biases) keep float32 moments: they are few, and
their blocks would be single numbers.

Numbers in 8 bits: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, dynamic
quantisation in blocks of 256. A code stands for a level between -1 and 1, times the scale of its block, which is the
block's largest absolute value. The levels are dense near the scale and reach down to 5.5e-7 of it: of each factor of 10
below the scale there are half as many levels as of the one above. A number between two levels becomes one of them by
chance, so that it is right on average. A moment that moves by less than the distance of two levels in each step would
stay where it is if it were rounded to the nearest one. A block is 256 numbers of one row of a matrix, one beside the
other (row: one index of the first dimension), so a matrix that is divided by rows among ranks has the blocks of the
whole one.

INVARIANT: a step depends, bit for bit, only on weights, gradients, settings and `state`. The chance of a step comes
from its number, so a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from nouscoder.learner.parallel.ranks import own_part, zeros_by_rows

_EPS = 1e-8


class AdamW8bit(Optimizer):
    """See the module. `state` of a matrix: step, exp_avg and root_exp_avg_sq (codes), and the scales of both."""

    def __init__(
        self, weights: Iterable[Parameter], learning_rate: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(weights, {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change every weight that has a gradient."""
        assert closure is None, "the gradients must be there already"
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state.update(_new_state(weight))
                    state["step"] += 1
                    self._change(weight, group, state, number)

    def _change(self, weight: Tensor, group: dict[str, Any], state: dict[str, Tensor], number: int) -> None:
        mine = {name: own_part(tensor) for name, tensor in state.items()}
        if not own_part(weight).numel():  # more ranks than rows
            return
        first, second = _moments(mine)
        own, gradient = own_part(weight), own_part(weight.grad).float()  # type: ignore[arg-type]
        (beta1, beta2), steps, rate = group["betas"], float(state["step"]), group["lr"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        own.mul_(1 - rate * group["weight_decay"])
        divisor = (second / (1 - beta2**steps)).sqrt_().add_(_EPS)
        own.addcdiv_(first, divisor, value=-rate / (1 - beta1**steps))
        if "exp_avg_scale" in mine:
            chance = torch.Generator(own.device).manual_seed(int(steps) * 2**20 + number)
            quantise(first, mine["exp_avg"], mine["exp_avg_scale"], signed=True, chance=chance)
            roots = second.sqrt_()
            quantise(roots, mine["root_exp_avg_sq"], mine["root_exp_avg_sq_scale"], signed=False, chance=chance)


def _new_state(weight: Tensor) -> dict[str, Tensor]:
    """Zero moments of a weight, divided among ranks as the weight is."""
    step = torch.zeros((), dtype=torch.float32)
    if weight.ndim < 2:
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
    blocks = (weight.shape[0], num_blocks(weight.shape))
    return {
        "step": step,
        "exp_avg": zeros_by_rows(weight, weight.shape, torch.uint8),
        "exp_avg_scale": zeros_by_rows(weight, blocks, torch.float32),
        "root_exp_avg_sq": zeros_by_rows(weight, weight.shape, torch.uint8),
        "root_exp_avg_sq_scale": zeros_by_rows(weight, blocks, torch.float32),
    }


def _moments(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The first and the second moment in float32. Those of vectors are the stored tensors themselves."""
    if "exp_avg_sq" in state:
        return state["exp_avg"], state["exp_avg_sq"]
    first = dequantise(state["exp_avg"], state["exp_avg_scale"], signed=True)
    roots = dequantise(state["root_exp_avg_sq"], state["root_exp_avg_sq_scale"], signed=False)
    return first, roots.square_()


BLOCK = 256

_DECADES = 7

_CHUNK = 2**24  # numbers that are converted at once, to bound the memory of intermediate results


@cache
def levels(*, signed: bool) -> Tensor:
    """The levels of the 256 codes, [256], ascending, in float32. Without sign all are above 0 except the first.

    In the decade k of _DECADES below the scale, the levels are the middles of equal parts of it.
    """
    positive: list[float] = []
    for decade in range(_DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        width = 0.9 / parts
        positive += [10.0 ** (decade - _DECADES + 1) * (0.1 + (part + 0.5) * width) for part in range(parts)]
    every = [*positive, *(-level for level in positive if signed), 0.0, 1.0]
    return torch.tensor(sorted(every), dtype=torch.float32)


def num_blocks(shape: torch.Size) -> int:
    """The blocks of each row of a tensor of this shape."""
    return -(-(shape.numel() // shape[0]) // BLOCK)


def quantise(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool, chance: torch.Generator) -> None:
    """Write `values` [rows, ...] as `codes` (uint8, of the same shape) and `scales` [rows, blocks], by `chance`.

    Without sign no number above 0 becomes 0.
    """
    table = levels(signed=signed).to(values.device)
    for rows in _row_chunks(values):
        # [rows, blocks, BLOCK] in float32, with zeros after the end of each row.
        flat = values[rows].flatten(1).float()
        padded = torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK))
        blocks = padded.reshape(len(flat), -1, BLOCK)
        scale = blocks.abs().amax(-1)
        share = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        above = torch.bucketize(share, table).clamp_(1, len(table) - 1)
        low, high = table[above - 1], table[above]
        # Up with the probability that makes the mean equal to the number. Beyond the levels it is the nearest one.
        draws = torch.rand(share.shape, generator=chance, device=values.device)
        code = above - (draws >= (share - low) / (high - low)).long()
        if not signed:
            code.clamp_(min=(share > 0).long())
        width = values[0].numel()
        codes[rows] = code.flatten(1)[:, :width].reshape(codes[rows].shape).to(torch.uint8)
        scales[rows] = scale


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The numbers [rows, ...] in float32."""
    table = levels(signed=signed).to(codes.device)
    numbers = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for rows in _row_chunks(codes):
        flat = codes[rows].flatten(1)
        scale = scales[rows].repeat_interleave(BLOCK, dim=1)[:, : flat.shape[1]]
        numbers[rows] = (table[flat.int()] * scale).reshape(numbers[rows].shape)
    return numbers


def _row_chunks(values: Tensor) -> list[slice]:
    rows = max(1, _CHUNK // max(1, values[0].numel())) if len(values) else 1
    return [slice(start, start + rows) for start in range(0, len(values), rows)]
