"""The keys and values of the running requests of the torch engine, and the passes that read and write them.

A pass through the model gets PromptPass or DecodePass as `past_key_values`. Each attention layer calls its `update`
once. transformers asks it for the number of tokens before the new ones and for the columns, to make the masks
(decoder.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PromptPass:
    """Fills slots from prompts. A prompt attends only to itself, so nothing is read from the cache.

    Slot first_slot + i gets the prompt in row source_rows[i], `source_rows` [new requests].
    """

    def __init__(self, cache: KeyValueCache, first_slot: int, source_rows: Tensor) -> None:
        self._cache = cache
        self._slots = slice(first_slot, first_slot + len(source_rows))
        self._source_rows = source_rows

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [prompts, kv_heads, width, size]. Several slots may share one prompt."""
        width = keys.shape[2]
        for stored, new in zip(self._cache.layer(layer, keys, values), (keys, values), strict=True):
            stored[self._slots, :, :width] = new[self._source_rows]
        return keys, values

    def get_query_offset(self, layer: int) -> int:
        """The number of tokens before the prompt: none."""
        return 0

    def get_seq_length(self) -> int:
        """As `get_query_offset`."""
        return 0

    def get_mask_sizes(self, width: int, layer: int) -> tuple[int, int]:
        """A prompt of `width` tokens attends to `width` tokens, from the first on."""
        return width, 0


class DecodePass:
    """Adds a column to each of the first slots, after its `lengths` [rows] columns, and reads the first `longest`."""

    def __init__(self, cache: KeyValueCache, lengths: Tensor, longest: int) -> None:
        self._cache = cache
        self._lengths = lengths
        self._longest = longest
        self._rows = torch.arange(len(lengths), device=lengths.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, 1, size] -> all so far, [rows, kv_heads, longest, size]."""
        all_keys, all_values = self._cache.layer(layer, keys, values)
        all_keys[self._rows, :, self._lengths] = keys[:, :, 0]
        all_values[self._rows, :, self._lengths] = values[:, :, 0]
        rows, longest = len(self._rows), self._longest
        return all_keys[:rows, :, :longest], all_values[:rows, :, :longest]

    def get_query_offset(self, layer: int) -> Tensor:
        """The number of tokens before the new one, of each row."""
        return self._lengths

    def get_seq_length(self) -> int:
        """The most of them."""
        return self._longest - 1

    def get_mask_sizes(self, width: int, layer: int) -> tuple[int, int]:
        """Each row has the first `longest` columns."""
        return self._longest, 0


class KeyValueCache:
    """Keys and values of each layer, [slots, kv_heads, capacity, size] each. Running requests use the first slots.

    A layer's storage is made when its first keys and values come, in their sizes: layers of a model may differ.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self._num_slots = num_slots
        self._capacity = capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The storage of a layer whose keys and values look like these, [rows, kv_heads, width, size]."""
        if number not in self._layers:
            # Zeros, because values that are not attended to are multiplied by a weight of 0, and 0 * NaN is NaN.
            self._layers[number] = (self._empty(keys), self._empty(values))
        return self._layers[number]

    def _empty(self, like: Tensor) -> Tensor:
        shape = (self._num_slots, like.shape[1], self._capacity, like.shape[3])
        with torch.inference_mode(False):  # it also changes outside of a step, when a request is cancelled
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one slot to another."""
        for both in self._layers.values():
            for stored in both:
                stored[target, :, :length] = stored[source, :, :length]
