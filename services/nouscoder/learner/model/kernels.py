"""Kernels of attention that take sequences of several lengths at once.

Packed rows need them (Dao, "FlashAttention-2", arXiv 2307.08691). A kernel gets query [queries, heads, size], key and
value [keys, key heads, size] and the segments of the row, and returns [queries, heads, size]. Several heads may share a
key head. `window` is the number of keys that a query attends to, with its own; None: all.

The heads of an attention are divided among calls of its kernel, so that all processors of a GPU have work. The
deterministic backward pass of flash-attention 2 (`mha_varlen_bwd`) starts ceil(processors / (sequences * heads)) blocks
for each sequence and head. Each works on its part of the keys, and a processor works on one block at a time. One
sequence of 32 heads on 132 processors is 160 blocks: 132, and then 28 while the other 104 processors wait. In calls of
12, 12, 4 and 4 heads there are 132 blocks each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from nouscoder.learner.model.packed_attention import (
    Layout,
    Segments,
    causal_mask,
    packed_attention,
)

# Up to torch 2.11 the kernel follows from the numbers of heads that queries share keys, and has no such argument.
_IS_TOLD_OF_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters

TORCH_VARLEN = "nouscoder_varlen"

# transformers makes masks of its own for a name with "flash" in it.
FA2_VARLEN = "nouscoder_varlen_fa2"

SDPA_VARLEN = "nouscoder_varlen_sdpa"

Kernel = Callable[[Tensor, Tensor, Tensor, Segments, float | None, int | None], Tensor]


def torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    """torch's kernel, on CUDA in 16 bits. Several calls have some of the heads each."""
    groups = [*_head_groups(query, key, segments)]
    if len(groups) == 1:
        return _one_call(query, key, value, segments, scale, window)
    of_keys = [size * key.shape[1] // query.shape[1] for size in groups]
    queries, keys, values = (
        torch.split(one, sizes, 1) for one, sizes in ((query, groups), (key, of_keys), (value, of_keys))
    )
    parts = zip(queries, keys, values, strict=True)
    return torch.cat([_one_call(*part, segments, scale, window) for part in parts], dim=1)


def _head_groups(query: Tensor, key: Tensor, segments: Segments) -> tuple[int, ...]:
    heads = query.shape[1]
    if not (torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled() and query.is_cuda):
        return (heads,)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return head_groups(len(segments.cu_queries) - 1, heads, heads // key.shape[1], processors)


def _one_call(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    groups: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _IS_TOLD_OF_GROUPS else {}
    output = varlen_attn(
        query,
        key,
        value,
        segments.cu_queries,
        segments.cu_keys,
        segments.max_queries,
        segments.max_keys,
        scale=scale,
        window_size=_sides(window),
        **groups,
    )
    assert isinstance(output, Tensor)
    return output


def fa2_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    """flash-attention 2's kernel, on CUDA in 16 bits."""
    from flash_attn import flash_attn_varlen_func

    output: Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        segments.cu_queries,
        segments.cu_keys,
        segments.max_queries,
        segments.max_keys,
        softmax_scale=scale,
        causal=True,
        window_size=_sides(window),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output


def sdpa_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    """One call of masked SDPA for each sequence, on any device in any type."""
    outputs = []
    of_queries, of_keys = (pairwise(ends.tolist()) for ends in (segments.cu_queries, segments.cu_keys))
    shared = query.shape[1] // key.shape[1]
    for (first_query, last_query), (first_key, last_key) in zip(of_queries, of_keys, strict=True):
        q = query[first_query:last_query]
        k, v = (one[first_key:last_key].repeat_interleave(shared, dim=1) for one in (key, value))
        mask = causal_mask(len(q), len(k), window, query.device)
        # [tokens, heads, size] -> [heads, tokens, size]
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def _sides(window: int | None) -> tuple[int, int]:
    """A causal window as both kernels take it: how many keys before the own one, and how many after. -1: all."""
    return (-1 if window is None else window - 1, 0)


def varlen_attention(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query, key, value [1, heads, length, size] -> [1, length, heads, size].

    Without a layout each row is one sequence, and SDPA is used. Raises ValueError for sinks and soft caps, which the
    kernels do not have.
    """
    if more.get("s_aux") is not None or more.get("softcap") is not None:
        raise ValueError("this kernel has neither attention sinks nor soft caps")
    if layout is None:
        more |= {"scaling": scaling, "sliding_window": sliding_window}
        return packed_attention(module, query, key, value, attention_mask, **more)
    # [1, heads, length, size] -> [length, heads, size]
    if attention_mask is not None:
        raise ValueError("the model makes a mask of its own, which packed rows do not have")
    queries, keys, values = (one[0].transpose(0, 1) for one in (query, key, value))
    keys, values = layout.keys_and_values(keys, values)
    return kernel(queries, keys, values, layout.segments, scaling, sliding_window).unsqueeze(0), None


# Calls cost something too: the heads are divided only where at most this share of the time is left.
_WORTH_IT = 0.85


@cache
def head_groups(num_sequences: int, num_heads: int, heads_a_key: int, num_processors: int) -> tuple[int, ...]:
    """The number of heads of each call, a multiple of `heads_a_key`, in the least time for sequences of one length."""
    alone = _time(num_sequences, num_heads, num_processors)
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for size in range(heads_a_key, num_heads + 1, heads_a_key):
        firsts = range(heads_a_key, size + 1, heads_a_key)
        rests = ((first, best[(size - first) // heads_a_key]) for first in firsts)
        best.append(
            min(
                (
                    (_time(num_sequences, first, num_processors) + spent, (first, *others))
                    for first, (spent, others) in rests
                ),
                key=lambda plan: (round(plan[0], 9), len(plan[1])),
            )
        )
    spent, groups = best[-1]
    return tuple(sorted(groups, reverse=True)) if spent <= _WORTH_IT * alone else (num_heads,)


def _time(num_sequences: int, num_heads: int, num_processors: int) -> float:
    """Of the backward pass of these heads, in that of one head of one sequence by one processor."""
    rows = num_sequences * num_heads
    parts = -(-num_processors // rows)
    return -(-rows * parts // num_processors) / parts
