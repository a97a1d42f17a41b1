"""Rows of about equal work for ranks that train together.

All ranks work through rounds of one row each, because a sharded layer needs every rank. A round lasts as long as its
most expensive row, so rows of similar cost share a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from transformers import PreTrainedModel

from nouscoder.learner.model.packing import plan
from nouscoder.learner.parallel.operations import active_parameters, attention_width


@dataclass(frozen=True, slots=True)
class Cost:
    """The estimated work of a rollout of n tokens: n + quadratic * n^2, in the work of a token without attention.

    A token's forward and backward pass takes 6 operations for each parameter at work; causal attention of n tokens
    takes 6 * layers * heads * head size * n^2 in all.
    """

    quadratic: float = 0.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> Cost:
        """That of rollouts under this model."""
        return cls(attention_width(model) / active_parameters(model))

    def of_length(self, length: int) -> float:
        """The work of a rollout of this length."""
        return length + self.quadratic * length**2


def rounds(lengths: Sequence[int], max_tokens: int, num_ranks: int, cost: Cost) -> list[list[list[int]]]:
    """The row of each rank in each round, [rounds][ranks]: indices of `lengths`, at most `max_tokens` of them.

    Only a rollout longer than `max_tokens` has a longer row, its own. Every index appears once. A row is empty where
    there are too few rollouts.
    """
    packed = plan(lengths, max_tokens)
    if num_ranks == 1:
        return [[row] for row in packed]
    num_rounds = ceil(len(packed) / num_ranks)
    while (rows := _balanced(lengths, max_tokens, num_rounds * num_ranks, cost)) is None:
        num_rounds += 1  # ends when each rollout can have its own row
    rows.sort(key=lambda row: -sum(cost.of_length(lengths[index]) for index in row))
    return [rows[first : first + num_ranks] for first in range(0, len(rows), num_ranks)]


def _balanced(lengths: Sequence[int], max_tokens: int, num_rows: int, cost: Cost) -> list[list[int]] | None:
    """Rows of similar cost: each rollout, longest first, goes to the cheapest row with room. None: one has no room."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    costs, tokens = [0.0] * num_rows, [0] * num_rows
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fits = [row for row in range(num_rows) if not rows[row] or tokens[row] + lengths[index] <= max_tokens]
        if not fits:
            return None
        row = min(fits, key=lambda row: costs[row])
        rows[row].append(index)
        costs[row] += cost.of_length(lengths[index])
        tokens[row] += lengths[index]
    return rows
