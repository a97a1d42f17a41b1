"""Causal attention inside each of several sequences that are packed in one row.

Sequences of similar length are padded to one width, only for the attention, and share one call of SDPA. Every other
layer works on the packed row, without padding. The work is that of the squares of the sequences' lengths, never that of
the square of the row's length, and there is no mask. transformers' own masked SDPA gives the same (a test shows it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED_ATTENTION = "nouscoder_packed"
# Padding inside a call of SDPA is at most 1 / 0.75 - 1 of the tokens, and 1 / 0.75^2 - 1 of the work.
_SHORTEST_PER_LONGEST = 0.75


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the queries and the keys of each sequence are, as varlen kernels read it.

    cu_queries, cu_keys int32 [sequences + 1]: sequence i has the queries from cu_queries[i] to cu_queries[i + 1] and
    the keys from cu_keys[i] to cu_keys[i + 1]. Its last query attends to all its keys, each query before to one key
    fewer. max_queries, max_keys: the most that one sequence has.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Segments:
        """Those of sequences with these numbers of queries and keys."""
        cu_queries, cu_keys = (
            torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device) for sizes in (queries, keys)
        )
        return cls(cu_queries, cu_keys, max(queries), max(keys))


class Layout(Protocol):
    """Where the sequences of a row are, of which this process may hold only a part."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each sequence of the whole row."""
        ...

    @property
    def segments(self) -> Segments:
        """The parts of sequences here."""
        ...

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [keys, heads, size] of the segments, from those of the tokens here."""
        ...


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the sequences of a row are.

    lengths: the tokens of each sequence. segments: the same for varlen kernels. blocks: (sequences, width) of each call
    of SDPA. gather [padded]: the position in the row of each place of the blocks, one block after another; places of
    padding repeat their sequence's last position. restore [length]: the place of each position of the row.
    """

    lengths: tuple[int, ...]
    segments: Segments
    blocks: tuple[tuple[int, int], ...]
    gather: Tensor
    restore: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> RowLayout:
        """The layout of sequences of these lengths, in the order of the row."""
        starts = [0, *accumulate(lengths)]
        restore = torch.empty(starts[-1], dtype=torch.int64)
        blocks: list[tuple[int, int]] = []
        gather: list[Tensor] = []
        for block in _similar(lengths):
            width = lengths[block[0]]
            for index in block:
                place = sum(map(len, gather))
                positions = torch.arange(width).clamp(max=lengths[index] - 1) + starts[index]
                gather.append(positions)
                restore[starts[index] : starts[index + 1]] = torch.arange(place, place + lengths[index])
            blocks.append((len(block), width))
        segments = Segments.of(lengths, lengths, device)
        return cls(tuple(lengths), segments, tuple(blocks), torch.cat(gather).to(device), restore.to(device))

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [keys, heads, size] of the segments: those of the row."""
        return key, value


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """The indices of `lengths`, longest first, divided where a length is too short for the first of its block."""
    blocks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if blocks and lengths[index] >= _SHORTEST_PER_LONGEST * lengths[blocks[-1][0]]:
            blocks[-1].append(index)
        else:
            blocks.append([index])
    return blocks


class _Pad(Function):
    """[heads, length, size] of the row -> [heads, padded, size] of the blocks.

    Padding is to the right of its sequence, where no token attends to it, so no gradient comes from there.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, gather: Tensor, restore: Tensor) -> Tensor:
        ctx.save_for_backward(restore)
        return row.index_select(1, gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (restore,) = ctx.saved_tensors
        return gradients[0].index_select(1, restore), None, None


class _Unpad(Function):
    """[padded, heads, size] of the blocks -> [length, heads, size] of the row. The outputs of padding are dropped."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, restore: Tensor) -> Tensor:
        ctx.num_padded = len(padded)
        ctx.save_for_backward(restore)
        return padded.index_select(0, restore)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (restore,) = ctx.saved_tensors
        padded = gradients[0].new_zeros(ctx.num_padded, *gradients[0].shape[1:])
        return padded.index_copy_(0, restore, gradients[0]), None


def _pad(row: Tensor, layout: RowLayout) -> Tensor:
    padded: Tensor = _Pad.apply(row, layout.gather, layout.restore)  # type: ignore[no-untyped-call]
    return padded


def _unpad(padded: Tensor, layout: RowLayout) -> Tensor:
    row: Tensor = _Unpad.apply(padded, layout.restore)  # type: ignore[no-untyped-call]
    return row


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: RowLayout | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query, key, value [1, heads, length, size] -> [1, length, heads, size].

    Without a layout each row is one sequence, and rows may be several.
    """
    if layout is None:
        mask = attention_mask if attention_mask is not None else _window(query, sliding_window)
        return sdpa_attention_forward(module, query, key, value, mask, **more)
    padded = [_pad(row[0], layout) for row in (query, key, value)]
    sizes = [sequences * width for sequences, width in layout.blocks]
    outputs = []
    for (sequences, _), *parts in zip(layout.blocks, *(torch.split(one, sizes, 1) for one in padded), strict=True):
        # [heads, sequences * width, size] -> [sequences, heads, width, size]
        q, k, v = (part.unflatten(1, (sequences, -1)).transpose(0, 1) for part in parts)
        output, _none = sdpa_attention_forward(module, q, k, v, _window(q, sliding_window), **more)
        outputs.append(output.flatten(0, 1))
    return _unpad(torch.cat(outputs), layout).unsqueeze(0), None


def _window(query: Tensor, sliding_window: int | None) -> Tensor | None:
    """The mask [width, width] of a causal window; None where the plain causal attention is the same."""
    width = query.shape[2]
    if sliding_window is None or sliding_window >= width:
        return None
    ones = torch.ones(width, width, dtype=torch.bool, device=query.device)
    return (ones.tril() & ones.triu(1 - sliding_window))[None, None]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
