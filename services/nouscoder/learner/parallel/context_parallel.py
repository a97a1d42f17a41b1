"""Context parallel: several ranks hold one packed row together, each a part of its tokens, so that long rollouts fit.

Keys and values are gathered from all ranks of the row, as in Llama 3 (arXiv 2407.21783, section 3.3.2). The row is
cut into two slices for each rank, and rank r of n holds slices r and 2n - 1 - r, so that causal attention is about the
same work for all. A row whose length is no multiple of 2n gets a short sequence at its end, on which no loss
token depends.

INVARIANT: the ranks of a row hold each loss token once, all have the scores of the whole row, and their gradients sum
to those of one process with the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from nouscoder.learner.model.packed_attention import Layout, Segments
from nouscoder.learner.model.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class DistributedRow:
    """The ranks of a row: the number of this one, and how many there are."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def gather_keys(self, mine: Tensor) -> Tensor:
        """[tokens of a rank, ...] of each rank -> [tokens of all, ...]; a gradient is summed over ranks."""
        gathered: Tensor = _GatherKeys.apply(mine, self)  # type: ignore[no-untyped-call]
        return gathered

    def gather_scores(self, mine: Tensor, owners: Tensor) -> Tensor:
        """[figures, own loss tokens] of each rank -> [figures, loss tokens]; owners [loss tokens]: the rank of each.

        All ranks compute the same loss of the result, so the gradient is this rank's part of it, not a sum.
        """
        gathered: Tensor = _GatherScores.apply(mine, owners, self)  # type: ignore[no-untyped-call]
        return gathered


class _GatherKeys(Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, row: DistributedRow) -> Tensor:
        ctx.row = row
        gathered = mine.new_empty(row.size * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(gathered, mine.contiguous(), group=row.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        of_all = gradients[0].contiguous()
        mine = of_all.new_empty(len(of_all) // ctx.row.size, *of_all.shape[1:])
        dist.reduce_scatter_tensor(mine, of_all, group=ctx.row.group)
        return mine, None


class _GatherScores(Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, owners: Tensor, row: DistributedRow) -> Tensor:
        ctx.row = row
        ctx.save_for_backward(owners)
        counts = torch.bincount(owners, minlength=row.size).tolist()
        padded = mine.new_zeros(len(mine), max(counts))
        padded[:, : mine.shape[1]] = mine
        gathered = padded.new_empty(row.size * len(padded), max(counts))
        dist.all_gather_into_tensor(gathered, padded, group=row.group)
        whole = mine.new_empty(len(mine), len(owners))
        for rank, (count, part) in enumerate(zip(counts, torch.split(gathered, len(mine)), strict=True)):
            whole[:, owners == rank] = part[:, :count]
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (owners,) = ctx.saved_tensors
        return gradients[0][:, owners == ctx.row.rank], None, None


@dataclass(frozen=True, slots=True)
class PartLayout(Layout):
    """Where the sequences of a row are, as the rank of `row` needs it that holds a part of the row.

    Each of the segments has the keys from its sequence's start to its own last token. keys [keys]: where those are
    among the keys of all ranks.
    """

    keys: Tensor
    row: DistributedRow

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all ranks, gathered."""
        both = self.row.gather_keys(torch.stack([key, value], dim=1)).index_select(0, self.keys)
        return both[:, 0], both[:, 1]


@dataclass(frozen=True, slots=True)
class RowPart:
    """A rank's part of a micro-batch, with its own loss tokens. owners [loss tokens of the row]: the rank of each."""

    micro_batch: MicroBatch
    owners: Tensor


def part_of(whole: MicroBatch, row: DistributedRow) -> RowPart:
    """The part of a micro-batch that this rank of the row holds."""
    device, length = whole.input_ids.device, whole.input_ids.shape[1]
    padding = -length % (2 * row.size)
    lengths = (*whole.layout.lengths, *([padding] if padding else []))
    # (start, end) in the row of what this rank holds.
    size = (length + padding) // (2 * row.size)
    first, second = row.rank, 2 * row.size - 1 - row.rank
    slices = (first * size, (first + 1) * size), (second * size, (second + 1) * size)
    here = torch.cat([torch.arange(start, end, device=device) for start, end in slices])
    places = _places(length + padding, row, device)
    more = torch.arange(padding, device=device)[None]
    owners, positions = (f(places[whole.positions], len(here)) for f in (_quotient, torch.remainder))
    mine = owners == row.rank
    micro_batch = replace(
        whole,
        input_ids=torch.cat([whole.input_ids, torch.zeros_like(more)], dim=1)[:, here],
        position_ids=torch.cat([whole.position_ids, more], dim=1)[:, here],
        layout=_layout(lengths, slices, places, row),
        rollout_of_token=whole.rollout_of_token[mine],
        positions=positions[mine],
        targets=whole.targets[mine],
        sampler_logprobs=whole.sampler_logprobs[mine],
        temperatures=whole.temperatures[mine],
        experts=None if whole.experts is None else whole.experts.at(here, padding),
    )
    return RowPart(micro_batch, owners)


def _quotient(values: Tensor, divisor: int) -> Tensor:
    return torch.div(values, divisor, rounding_mode="floor")


def _places(length: int, row: DistributedRow, device: torch.device) -> Tensor:
    """The place of each position of the row where the tokens of all ranks come one rank after another, [length]."""
    size = length // (2 * row.size)
    positions = torch.arange(length, device=device)
    number = _quotient(positions, size)  # of the slice
    is_first = number < row.size
    owner = torch.where(is_first, number, 2 * row.size - 1 - number)
    return 2 * size * owner + torch.where(is_first, 0, size) + positions % size


def _layout(
    lengths: tuple[int, ...], slices: tuple[tuple[int, int], ...], places: Tensor, row: DistributedRow
) -> PartLayout:
    """The segments of the slices: each part of a sequence, in the order of the tokens here."""
    queries: list[int] = []
    keys: list[Tensor] = []
    for first, last in slices:
        start = 0
        for length in lengths:
            begin, end = max(first, start), min(last, start + length)
            if begin < end:
                queries.append(end - begin)
                keys.append(places[start:end])
            start += length
    segments = Segments.of(queries, [len(part) for part in keys], places.device)
    return PartLayout(lengths, segments, torch.cat(keys), row)
