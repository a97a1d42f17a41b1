"""Attention of packed rows by kernels that take sequences of several lengths at once, without padding.

Dao, "FlashAttention-2", arXiv 2307.08691. A kernel gets query [queries, heads, size], key and value [keys, key heads,
size] and the segments of the row, and returns [queries, heads, size]. Several heads may share a key head. `window` is
the number of keys that a query attends to, with its own; None: all.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from nouscoder.learner.head_groups import head_groups
from nouscoder.learner.packed_attention import Layout, Segments, packed_attention

TORCH_VARLEN = "nouscoder_varlen"
# transformers makes masks of its own for a name with "flash" in it.
FA2_VARLEN = "nouscoder_varlen_fa2"
SDPA_VARLEN = "nouscoder_varlen_sdpa"


class Kernel(Protocol):
    """See the module."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
    ) -> Tensor:
        """The attention, [queries, heads, size]."""
        ...


def torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    """torch's kernel, on CUDA in 16 bits. Several calls have some of the heads each (head_groups.py)."""
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
        enable_gqa=query.shape[1] != key.shape[1],
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
        mask = _causal_mask(len(q), len(k), window, query.device)
        # [tokens, heads, size] -> [heads, tokens, size]
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query attends to, [queries, keys]: the last query to the newest key and `window` - 1 before."""
    distance = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None] - torch.arange(
        num_keys, device=device
    )
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


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

    Without a layout each row is one sequence, and SDPA is used.
    """
    if layout is None:
        more |= {"scaling": scaling, "sliding_window": sliding_window}
        return packed_attention(module, query, key, value, attention_mask, **more)
    # [1, heads, length, size] -> [length, heads, size]
    queries, keys, values = (one[0].transpose(0, 1) for one in (query, key, value))
    keys, values = layout.keys_and_values(keys, values)
    return kernel(queries, keys, values, layout.segments, scaling, sliding_window).unsqueeze(0), None


for _name, _kernel in ((TORCH_VARLEN, torch_varlen), (FA2_VARLEN, fa2_varlen), (SDPA_VARLEN, sdpa_varlen)):
    AttentionInterface.register(_name, partial(varlen_attention, _kernel))
