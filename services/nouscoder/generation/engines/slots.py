"""The running requests by slot: tensors for the next decoding step, and lists of the sampled tokens.

INVARIANT: the running requests are in slots 0 .. num_running - 1, and entry s of every vector here and of the
key-value cache belongs to the request in slot s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nouscoder.domain.tokens import Completion, FinishReason, SampledTokens, float32, int32, spans_of
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.generation.engines.expert_recorder import Choices, expert_choices
from nouscoder.generation.engines.kv_cache import KeyValueCache
from nouscoder.generation.engines.sampling import Choice, choose_tokens, draws_of


@dataclass(slots=True)
class Row:
    """A completion in progress. It is cut at `max_tokens`.

    `experts` are those of the tokens in the cache, [positions, layers, top_k] in parts; empty when none are recorded.
    """

    request: SampleRequest
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[Choices] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """The number of tokens whose keys and values are in the cache: all but the newest."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ends with its newest token; None while it continues."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) == self.max_tokens else None

    def sampled(self, start: int = 0) -> SampledTokens:
        """The tokens from number `start` on."""
        return SampledTokens(
            int32(self.token_ids[start:]),
            float32(self.logprobs[start:]),
            spans_of(self.versions[start:]),
            experts=expert_choices(self.experts[start:]),  # the first are those of the prompt
        )

    def completion(self, reason: FinishReason) -> Completion:
        """The finished completion."""
        return self.sampled().ended(reason)


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
        self._length[where] = torch.tensor([len(row.prompt_token_ids) for row in rows])
        self._temperature[where] = torch.tensor([row.request.sampling.temperature for row in rows])
        self._top_p[where] = torch.tensor([row.request.sampling.top_p for row in rows], dtype=torch.float64)
        self._num_sampled[where] = 0
        self.rows += rows
        return slots

    def choose(self, slots: range, logits: Tensor) -> Choice:
        """The next token of these slots from `logits` [slots, vocabulary]."""
        where = slice(slots.start, slots.stop)
        draws = self._draws[self._index[where], self._num_sampled[where]]
        truncated = any(row.request.sampling.top_p < 1 for row in self.rows[where])
        top_p = self._top_p[where] if truncated else None
        return choose_tokens(logits, draws, self._temperature[where], top_p)

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
                self._move(last, slot)
                self.rows[slot] = self.rows[last]
            self.rows.pop()

    def _move(self, source: int, target: int) -> None:
        self._cache.move(source, target, self.rows[source].cached_tokens)
        for vector in (self._last_token, self._length, self._num_sampled, self._temperature, self._top_p, self._draws):
            vector[target] = vector[source]
