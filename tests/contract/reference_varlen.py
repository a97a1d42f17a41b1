"""Attention of packed sequences in loops, and the functions of both varlen kernels on a CPU, as strict as theirs."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


def attention_in_loops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[list[int], list[int]],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """[queries, heads, size], one query and head after another. ends: where the sequences' queries and keys end."""
    scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
    shared = query.shape[1] // key.shape[1]
    outputs = []
    for (first_query, end_query), (first_key, end_key) in zip(*(pairwise([0, *side]) for side in ends), strict=True):
        for place in range(first_query, end_query):
            newest = end_key - (end_query - place)  # the key of the query's own token
            oldest = first_key if window is None else max(first_key, newest - window + 1)
            for head in range(query.shape[1]):
                keys, values = (one[oldest : newest + 1, head // shared] for one in (key, value))
                scores = scale * keys @ query[place, head]
                weights = (scores - scores.max()).exp()
                outputs.append(weights @ values / weights.sum())
    return torch.stack(outputs).reshape(query.shape)


def varlen_attn_on_cpu(*arguments: Any, **more: Any) -> Tensor:
    """torch's varlen_attn, in loops. It refuses what the kernel refuses."""
    bound = inspect.signature(varlen_attn).bind(*arguments, **more)
    bound.apply_defaults()
    given = bound.arguments
    assert given["enable_gqa"] is (given["query"].shape[1] != given["key"].shape[1])
    assert given["return_aux"] is given["seqused_k"] is given["block_table"] is None
    ends = (
        _ends(given["cu_seq_q"], given["max_q"], given["query"]),
        _ends(given["cu_seq_k"], given["max_k"], given["key"]),
    )
    return _causal(given["query"], given["key"], given["value"], ends, given["scale"], given["window_size"])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attention 2.8's function, in loops."""
    assert causal
    assert deterministic is torch.are_deterministic_algorithms_enabled()
    assert (dropout_p, softcap, alibi_slopes, return_attn_probs, block_table) == (0.0, 0.0, None, False, None)
    ends = _ends(cu_seqlens_q, max_seqlen_q, q), _ends(cu_seqlens_k, max_seqlen_k, k)
    return _causal(q, k, v, ends, softmax_scale, window_size)


def _ends(cumulative: Tensor, most: int, tokens: Tensor) -> list[int]:
    assert cumulative.dtype is torch.int32
    assert cumulative.is_contiguous()
    assert cumulative.device == tokens.device
    first, *ends = cumulative.tolist()
    assert (first, ends[-1]) == (0, len(tokens))
    assert most == max(end - start for start, end in pairwise([0, *ends]))
    return [int(end) for end in ends]


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[list[int], list[int]],
    scale: float | None,
    sides: tuple[int, int],
) -> Tensor:
    assert key.shape == value.shape
    assert query.ndim == key.ndim == 3
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    before, after = sides
    assert after == 0, "no query sees a later key"
    return attention_in_loops(query, key, value, ends, scale, None if before == -1 else before + 1)
