"""The running requests of the torch engine, one slot each: keys and values, random draws, and the sampled tokens.

INVARIANT: the running requests are in slots 0 .. num_running - 1, and entry s of every vector here and of the
key-value cache belongs to the request in slot s. Columns 0 .. length - 1 of slot s hold the keys and values of that
request and of no other. Later columns hold finite values and are never attended to. `ExpertRecorder.take` returns the
choices of exactly the last forward pass, one for each of its tokens and layers.

A pass through the model gets PromptPass or DecodePass as `past_key_values`. Each attention layer calls its `update`
once. transformers asks it for the number of tokens before the new ones and for the columns, to make the masks
(attention.py).

The random stream of a request is a Philox sequence with its seed as key. Its i-th number determines the i-th token,
independently of the other rows of the batch. The token is the inverse of the cumulative distribution at that number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nouscoder.generation.engines.base import SampleRequest, seed_of
from nouscoder.generation.engines.stepped import RouterChoices, Row
from nouscoder.policy_folder.policy_tensors import routers_of

# With a smaller one, logits divided by it could be infinite in float32, and one request would end the engine.
_MIN_TEMPERATURE = 1e-6

# The keys and values.


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


# The choice of the next token of every row at once.


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The chosen tokens and their log-probabilities, both [rows]."""

    token_ids: Tensor
    logprobs: Tensor


def draws_of(request: SampleRequest, num_tokens: int) -> Tensor:
    """Random numbers in (0, 1] of the next tokens of a request, after those of the kept ones, [num_tokens] float64."""
    stream = np.random.Generator(np.random.Philox(key=seed_of(request)))
    return torch.from_numpy(1.0 - stream.random(request.num_kept + num_tokens)[request.num_kept :])


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens are candidates, each [rows]: see SampleRequest. `top_p` is 1, `top_k` and `min_p` are 0 for all."""

    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


def choose_tokens(logits: Tensor, draws: Tensor, temperature: Tensor, truncation: Truncation | None) -> ChosenTokens:
    """Sample one token per row from `logits` [rows, vocabulary] with `draws`, `temperature` and `truncation` [rows].

    Temperature 0 selects the most likely token; any other below 1e-6 counts as 1e-6. Without `truncation` all tokens
    are candidates. The log-probability of the sampled token is that of the full softmax at the sampling temperature
    (for temperature 0: at 1), before truncation, so that truncation does not bias ratios to a policy's probabilities.
    A row with NaN logits gets a NaN log-probability and token 0.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature.clamp_min(_MIN_TEMPERATURE))[:, None]
    all_logprobs = torch.log_softmax(scaled, dim=-1)
    probabilities = all_logprobs.exp()
    if truncation is not None:
        probabilities = _truncate(probabilities.double(), truncation)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # 0 < draws * total <= total, so a first entry that reaches it exists, and its probability is above 0.
    token_ids = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None])
    if bool(greedy.any()):
        token_ids = torch.where(greedy[:, None], scaled.argmax(dim=-1, keepdim=True), token_ids)
    not_numbers = torch.isnan(cumulative[:, -1:])
    token_ids = token_ids.masked_fill_(not_numbers, 0)
    logprobs = all_logprobs.gather(1, token_ids).masked_fill_(not_numbers, float("nan"))
    return ChosenTokens(token_ids[:, 0], logprobs[:, 0])


def _truncate(probabilities: Tensor, truncation: Truncation) -> Tensor:
    """Zero all but the candidates, in vLLM's order: min-p (2407.01082), then top-k, then of those the smallest set of
    most likely tokens whose share reaches top-p (nucleus sampling, 1904.09751).
    """
    ordered, order = probabilities.sort(dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    limits = truncation.top_k.where(truncation.top_k > 0, ordered.shape[-1])
    ordered.masked_fill_(ordered < truncation.min_p[:, None] * ordered[:, :1], 0.0)
    ordered.masked_fill_(ranks >= limits[:, None], 0.0)
    cumulative = ordered.cumsum(dim=-1)
    ordered.masked_fill_(cumulative - ordered >= truncation.top_p[:, None] * cumulative[:, -1:], 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)


# The experts that a mixture-of-experts model chooses, for router replay (R3, arXiv 2510.11370).


class ExpertRecorder:
    """Listens to the routers of a model. Raises ValueError for a model without experts."""

    def __init__(self, model: nn.Module) -> None:
        routers: Any = routers_of(model)
        if not routers:
            raise ValueError("policy.router_replay needs a policy with experts (qwen3_moe)")
        self._num_layers = len(routers)
        self._type = np.uint8 if routers[0].num_experts <= 256 else np.uint16
        self._chosen: list[Tensor] = []
        for router in routers:
            router.register_forward_hook(self._keep)

    def _keep(self, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if len(self._chosen) == self._num_layers:  # of a pass that nobody asked about
            self._chosen = []
        self._chosen.append(output[2])

    def take(self, *shape: int) -> RouterChoices:
        """Those of the last pass, [*shape, layers, top_k]: `shape` is that of its tokens."""
        chosen, self._chosen = torch.stack(self._chosen, dim=1), []
        array: RouterChoices = chosen.cpu().numpy().astype(self._type)
        return array.reshape(*shape, *array.shape[1:])


# The requests.


class Slots:
    """Vectors [slots] and random draws [slots, capacity] next to the cache. Rows join at the end and leave anywhere."""

    def __init__(self, cache: KeyValueCache, num_slots: int, capacity: int, device: torch.device) -> None:
        self._cache = cache
        self.rows: list[Row] = []
        self._index = torch.arange(num_slots, device=device)
        self._last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._length = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._num_sampled = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._temperature = torch.ones(num_slots, device=device)
        self._top_p = torch.ones(num_slots, dtype=torch.float64, device=device)
        self._top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._min_p = torch.zeros(num_slots, dtype=torch.float64, device=device)
        self._draws = torch.ones((num_slots, capacity), dtype=torch.float64, device=device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last_tokens(self) -> Tensor:
        """The newest token of each running request, [running]."""
        return self._last_token[: len(self.rows)]

    @property
    def lengths(self) -> Tensor:
        """Columns of the cache in use, [running]."""
        return self._length[: len(self.rows)]

    def join(self, rows: list[Row]) -> range:
        """Assign the next slots to new requests, whose prompts are in the cache."""
        slots = range(len(self.rows), len(self.rows) + len(rows))
        for slot, row in zip(slots, rows, strict=True):
            self._draws[slot, : row.max_tokens] = draws_of(row.request, row.max_tokens)
        where = slice(slots.start, slots.stop)
        self._length[where] = torch.tensor([len(row.prompt) for row in rows])
        self._temperature[where] = torch.tensor([row.request.sampling.temperature for row in rows])
        self._top_p[where] = torch.tensor([row.request.sampling.top_p for row in rows], dtype=torch.float64)
        self._top_k[where] = torch.tensor([row.request.top_k for row in rows])
        self._min_p[where] = torch.tensor([row.request.min_p for row in rows], dtype=torch.float64)
        self._num_sampled[where] = 0
        self.rows += rows
        return slots

    def choose(self, slots: range, logits: Tensor) -> ChosenTokens:
        """The next token of these slots from `logits` [slots, vocabulary]."""
        where = slice(slots.start, slots.stop)
        draws = self._draws[self._index[where], self._num_sampled[where]]
        requests = [row.request for row in self.rows[where]]
        truncation = None
        if any(request.sampling.top_p < 1 or request.top_k or request.min_p for request in requests):
            truncation = Truncation(self._top_p[where], self._top_k[where], self._min_p[where])
        return choose_tokens(logits, draws, self._temperature[where], truncation)

    def took(self, slots: range, token_ids: Tensor) -> None:
        """Record the tokens chosen for these slots, [slots]."""
        where = slice(slots.start, slots.stop)
        self._last_token[where] = token_ids
        self._num_sampled[where] += 1

    def advance(self) -> None:
        """Record that the newest token of every running request is in the cache."""
        self._length[: len(self.rows)] += 1

    def leave(self, slots: list[int]) -> None:
        """Free these slots. The last running requests move into them."""
        for slot in sorted(slots, reverse=True):
            last = len(self.rows) - 1
            if slot != last:
                self._cache.move(last, slot, self.rows[last].cached_tokens)
                for vector in (
                    *(self._last_token, self._length, self._num_sampled, self._draws),
                    *(self._temperature, self._top_p, self._top_k, self._min_p),
                ):
                    vector[slot] = vector[last]
                self.rows[slot] = self.rows[last]
            self.rows.pop()
