"""Numbers in 8 bits, in blocks of 256 with a common scale.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861: dynamic quantisation. A code stands
for a level between -1 and 1, times the scale of its block, which is the block's largest absolute value. The levels are
dense near the scale and reach down to 5.5e-7 of it: of each factor of 10 below the scale there are half as many levels
as of the one above.

A number between two levels becomes one of them by chance, so that it is right on average. A moment that moves by less
than the distance of two levels in each step would stay where it is if it were rounded to the nearest one.

A block is 256 neighbours of one row of a matrix (row: one index of the first dimension), so a matrix that is divided
by rows among ranks has the blocks of the whole one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

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
        blocks = _in_blocks(values[rows])
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


def _in_blocks(values: Tensor) -> Tensor:
    """[rows, blocks, BLOCK] in float32, with zeros after the end of each row."""
    flat = values.flatten(1).float()
    padded = torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK))
    return padded.reshape(len(flat), -1, BLOCK)
