"""The running requests of the torch engine, one slot each: keys and values, random draws, and the sampled tokens.

INVARIANT: the running requests are in slots 0 .. num_running - 1, and entry s of every vector here and of the
key-value cache belongs to the request in slot s. Columns 0 .. length - 1 of slot s hold the keys and values of that
request and of no other. Later columns hold finite values and are never attended to. `ExpertRecorder.take` returns the
choices of exactly the last forward pass, one for each of its tokens and layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nouscoder.generation.engines.kv_cache import KeyValueCache
from nouscoder.generation.engines.stepped import RouterChoices, Row
from nouscoder.generation.engines.token_choice import ChosenTokens, Truncation, choose_tokens, draws_of
from nouscoder.policy_folder.policy_tensors import routers_of


class ExpertRecorder:
    """Listens to the routers of a model, for router replay (R3, arXiv 2510.11370).

    Raises ValueError for a model without experts.
    """

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
