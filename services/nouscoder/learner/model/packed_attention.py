"""Attention inside each sequence of a packed row, and which models have packed rows.

Attention is causal inside each of the packed sequences. Sequences of similar length are padded to one width, only for
the attention, and share one call of SDPA. Every other layer works on the packed row, without padding. The work is that
of the squares of the sequences' lengths, never that of the square of the row's length, and there is no mask.
transformers' own attention of each sequence alone gives the same (a test shows it).

Two kinds of attention are more than SDPA's softmax of the logits z = scale * q k. gpt-oss has a sink s for each head,
which takes a share of the weights and gives nothing (transformers, modeling_gpt_oss):

    weight of key j = exp(z_j) / (exp(s) + sum of exp(z_i))

That is one more key at the front of each sequence, with the logit s for all queries and a value of zeros. Gemma 2 has
soft caps (arXiv 2408.00118, section 2): c tanh(z / c) takes the place of z. SDPA has no such logits, so they are made
explicitly, for some queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_OURS = "nouscoder_"

PACKED_ATTENTION = f"{_OURS}packed"

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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the sequences of a row are: their lengths in the whole row, and the segments that are here."""

    lengths: tuple[int, ...]
    segments: Segments

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [keys, heads, size] of the segments, from those of the tokens here: the same."""
        return key, value


@dataclass(frozen=True, slots=True)
class RowLayout(Layout):
    """Where the sequences of a whole row are.

    blocks: (sequences, width) of each call of SDPA. gather [padded]: the position in the row of each place of the
    blocks, one block after another; places of padding repeat their sequence's last position. restore [length]: the
    place of each position of the row. `shares`: sequences have positions in common, which have several places each;
    `restore` has one of them.
    """

    blocks: tuple[tuple[int, int], ...]
    gather: Tensor
    restore: Tensor
    shares: bool = False

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, positions: Sequence[Tensor] = ()) -> RowLayout:
        """The layout of sequences of these lengths, in the order of the row.

        `positions`: where the tokens of each sequence are in the row, if sequences have some in common.
        """
        starts = [0, *accumulate(lengths)]
        if not positions:
            positions = [torch.arange(*ends) for ends in pairwise(starts)]
        restore = torch.empty(1 + max(int(where[-1]) for where in positions), dtype=torch.int64)
        blocks: list[tuple[int, int]] = []
        gather: list[Tensor] = []
        for block in _similar(lengths):
            width = lengths[block[0]]
            for index in block:
                place = sum(map(len, gather))
                gather.append(positions[index][torch.arange(width).clamp(max=lengths[index] - 1)])
                restore[positions[index]] = torch.arange(place, place + lengths[index])
            blocks.append((len(block), width))
        segments = Segments.of(lengths, lengths, device)
        shares = len(restore) < starts[-1]
        return cls(tuple(lengths), segments, tuple(blocks), torch.cat(gather).to(device), restore.to(device), shares)


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
    """[heads, length, size] of the row -> [heads, padded, size] of the blocks. The gradient of padding is 0."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, layout: RowLayout) -> Tensor:
        ctx.layout = layout
        return row.index_select(1, layout.gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        layout, (padded,) = ctx.layout, gradients
        if not layout.shares:
            return padded.index_select(1, layout.restore), None
        exact = padded.to(torch.promote_types(padded.dtype, torch.float32))
        row = exact.new_zeros(exact.shape[0], len(layout.restore), exact.shape[2])
        return row.index_add_(1, layout.gather, exact).to(padded.dtype), None


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

    Without a layout each row is one sequence, and rows may be several. Raises ValueError for a mask beside a layout.
    """
    if layout is None:
        mask = attention_mask if attention_mask is not None else _window(query.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(module, query, key, value, mask, **more)
    if attention_mask is not None:
        raise ValueError("the model makes a mask of its own, which packed rows do not have")
    padded: list[Tensor] = [_Pad.apply(row[0], layout) for row in (query, key, value)]  # type: ignore[no-untyped-call]
    sizes = [sequences * width for sequences, width in layout.blocks]
    outputs = []
    for (sequences, _), *parts in zip(layout.blocks, *(torch.split(one, sizes, 1) for one in padded), strict=True):
        # [heads, sequences * width, size] -> [sequences, heads, width, size]
        q, k, v = (part.unflatten(1, (sequences, -1)).transpose(0, 1) for part in parts)
        outputs.append(_of_sequences(module, q, k, v, sliding_window, **more).flatten(0, 1))
    row: Tensor = _Unpad.apply(torch.cat(outputs), layout.restore)  # type: ignore[no-untyped-call]
    return row.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _of_sequences(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    *,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    scaling: float | None = None,
    **more: Any,
) -> Tensor:
    """[sequences, heads, width, size] -> [sequences, width, heads, size]: causal attention inside each sequence."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None:
        return _soft_capped(query, key, value, window, softcap, scale)
    if s_aux is not None:
        return _with_sinks(module, query, key, value, window, s_aux, scale)
    mask = _window(query.shape[2], window, query.device)
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **more)[0]


# Kernels of SDPA want heads whose size is a multiple of this.
_HEAD_STEP = 8


def _with_sinks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: Tensor, scale: float
) -> Tensor:
    """Attention with one sink a head, see the module. The sink is the key of a token at the front.

    Key heads are shared, and sinks are not: one more number of a query holds its head's sink, and a 1 in the sink's key
    chooses it.
    """
    size = query.shape[-1]
    query, key, value = (F.pad(one, (0, _HEAD_STEP, 1, 0)) for one in (query, key, value))
    is_extra = torch.zeros(query.shape[-1], dtype=torch.bool, device=query.device)
    is_extra[size] = True
    is_first = torch.zeros(key.shape[2], 1, dtype=torch.bool, device=key.device)
    is_first[0] = True
    query = torch.where(is_extra, (sinks / scale).to(query.dtype).view(1, -1, 1, 1), query)
    key = torch.where(is_extra & is_first, torch.ones_like(key), key)
    mask = _window(query.shape[2], window, query.device)
    if mask is not None:
        mask[..., 0] = True
    output: Tensor = sdpa_attention_forward(module, query, key, value, mask, scaling=scale)[0]
    return output[:, 1:, :, :size]


_QUERIES_AT_ONCE = 512


def _soft_capped(query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float, scale: float) -> Tensor:
    """Attention with soft caps, see the module. The backward pass computes the logits again."""
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for one in (key, value))

    def part(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        logits = softcap * torch.tanh(queries @ keys.transpose(-1, -2) * (scale / softcap))
        seen = causal_mask(queries.shape[2], keys.shape[2], window, keys.device)
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
        return weights.to(values.dtype) @ values

    def parts() -> Iterator[Tensor]:
        for start in range(0, query.shape[2], _QUERIES_AT_ONCE):
            end = min(start + _QUERIES_AT_ONCE, query.shape[2])
            inputs = (query[:, :, start:end], key[:, :, :end], value[:, :, :end])
            yield checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)

    return torch.cat([*parts()], dim=2).transpose(1, 2)


def _window(width: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """The mask [1, 1, width, width] of a causal window; None where the plain causal attention is the same."""
    if sliding_window is None or sliding_window >= width:
        return None
    return causal_mask(width, width, sliding_window, device)[None, None]


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query attends to, [queries, keys]: the last query to the newest key and `window` - 1 before."""
    keys = torch.arange(num_keys, device=device)
    distance = keys[num_keys - num_queries :, None] - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


_PACKABLE = {"full_attention", "sliding_attention", "linear_attention"}

_ROPE_BY_LENGTH = ("dynamic", "longrope")


def packs(model: PreTrainedModel) -> bool:
    """Whether rows of this model may have several sequences: its attention is one of ours."""
    return str(model.config._attn_implementation).startswith(_OURS)


def row_budget(model: PreTrainedModel, max_tokens: int) -> int:
    """The tokens of a row of this model, for `plan`. 0, where each sequence needs a row of its own."""
    return max_tokens if packs(model) else 0


def last_states(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, layout: Layout, **more: Any) -> Tensor:
    """The last hidden states of a row, [length, hidden]. Raises ValueError for several sequences without packing."""
    if packs(model):
        more |= {"layout": layout, **_for_linear_layers(model, layout)}
    elif len(layout.lengths) > 1:
        raise ValueError(f"rows of a {model.config.model_type} model have one sequence each")
    decoder: nn.Module = model.base_model
    if decoder is model:  # Llama 4 names another module
        decoder = model.model
    states: Tensor = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **more).last_hidden_state
    return states[0]


def _for_linear_layers(model: PreTrainedModel, layout: Layout) -> dict[str, Tensor]:
    """Where the sequences of a row are, as kernels of linear attention read it (Qwen3-Next, Qwen3.5).

    transformers raises ValueError where the packages of these kernels are not installed.
    """
    if "linear_attention" not in _layer_kinds(model):
        return {}
    ends = layout.segments.cu_queries
    numbers = torch.arange(len(ends) - 1, dtype=torch.int32, device=ends.device).repeat_interleave(ends.diff())
    return {"cu_seq_lens_q": ends, "seq_idx": numbers.unsqueeze(0)}


def _layer_kinds(model: PreTrainedModel) -> set[str]:
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ())


def attend_packed(model: PreTrainedModel, name: str = PACKED_ATTENTION) -> None:
    """Have the model use this attention of packed rows, if the model lets its attention be chosen.

    Other kinds of layers than these are in transformers' masks alone, which packed rows do not have. Some positions
    depend on the longest sequence of a row (Phi 3 with a long context).
    """
    rope = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    by_length = any(f"'{kind}'" in rope for kind in _ROPE_BY_LENGTH)
    if _layer_kinds(model) <= _PACKABLE and not by_length and model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def attend_alone(model: PreTrainedModel) -> None:
    """Have the model use transformers' own attention, for rows of one sequence."""
    if packs(model):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
