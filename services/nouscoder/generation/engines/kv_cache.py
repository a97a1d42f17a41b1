"""The keys and values of every running request, one slot each.

INVARIANT: columns 0 .. length - 1 of slot s hold the keys and values of the request in slot s and of no other. Later
columns hold finite values and are never attended to.

A pass through the model gets one of the two small objects below as `past_key_values`. Each attention layer calls its
`update` once. transformers asks PromptPass for sizes, to see that the mask is plainly causal and none is to be made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PromptPass:
    """Fills slots from prompts. A prompt attends only to itself, so nothing is read from the cache."""

    def __init__(self, store: Tensor, first_slot: int, source_rows: Tensor) -> None:
        self._store = store
        self._slots = slice(first_slot, first_slot + len(source_rows))
        self._source_rows = source_rows

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [prompts, kv_heads, width, head_dim]. Several slots may share one prompt."""
        width = keys.shape[2]
        self._store[layer, 0, self._slots, :, :width] = keys[self._source_rows]
        self._store[layer, 1, self._slots, :, :width] = values[self._source_rows]
        return keys, values

    def get_query_offset(self, layer: int) -> int:
        """The number of tokens before the prompt: none."""
        return 0

    def get_mask_sizes(self, width: int, layer: int) -> tuple[int, int]:
        """A prompt of `width` tokens attends to `width` tokens, from the first on."""
        return width, 0


class DecodePass:
    """Adds one column to each of the first `len(lengths)` slots and reads the first `longest` columns."""

    def __init__(self, store: Tensor, lengths: Tensor, longest: int) -> None:
        self._store = store
        self._lengths = lengths
        self._longest = longest
        self._rows = torch.arange(len(lengths), device=lengths.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, 1, head_dim] -> all so far, [rows, kv_heads, longest, head_dim]."""
        all_keys, all_values = self._store[layer, 0], self._store[layer, 1]
        all_keys[self._rows, :, self._lengths] = keys[:, :, 0]
        all_values[self._rows, :, self._lengths] = values[:, :, 0]
        rows, longest = len(self._rows), self._longest
        return all_keys[:rows, :, :longest], all_values[:rows, :, :longest]


class KeyValueCache:
    """Static storage [layers, 2, slots, kv_heads, capacity, head_dim]. Running requests use the first slots."""

    def __init__(self, model_config: Any, num_slots: int, capacity: int, device: torch.device) -> None:
        heads = model_config.num_attention_heads
        head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
        kv_heads = getattr(model_config, "num_key_value_heads", None) or heads
        # Zeros, because values that are not attended to are multiplied by a weight of 0, and 0 * NaN is NaN.
        self._store = torch.zeros(
            (model_config.num_hidden_layers, 2, num_slots, kv_heads, capacity, head_dim), device=device
        )

    def prompt_pass(self, first_slot: int, source_rows: Tensor) -> PromptPass:
        """Slot first_slot + i gets the prompt in row source_rows[i], `source_rows` [new requests]."""
        return PromptPass(self._store, first_slot, source_rows)

    def decode_pass(self, lengths: Tensor, longest: int) -> DecodePass:
        """`lengths` [rows]: columns in use before this token. `longest`: columns to attend to, with the new one."""
        return DecodePass(self._store, lengths, longest)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one slot to another."""
        self._store[:, :, target, :, :length] = self._store[:, :, source, :, :length]


def decode_mask(lengths: Tensor, longest: int) -> Tensor:
    """Additive mask [rows, 1, 1, longest] that lets each row attend to its columns 0 .. length, `lengths` [rows]."""
    columns = torch.arange(longest, device=lengths.device)
    mask = torch.zeros((len(lengths), longest), device=lengths.device)
    return mask.masked_fill_(columns > lengths[:, None], float("-inf"))[:, None, None]
