"""Micro-batches: rollouts of like length side by side, padded on the right, within a budget of padded tokens.

Causal attention never looks to the right, so padding on the right changes nothing and needs no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nouscoder.domain.rollout import Rollout

_PAD_ID = 0  # any id will do: nothing reads what stands at padding


class PackingError(ValueError):
    """A rollout cannot be trained on; the message names it."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rollouts, ready for one forward pass.

    rollout_indices [rows]: positions in the sequence given to `pack`. input_ids [rows, width]. Of the loss tokens, row
    by row and in order: rows [tokens] and columns [tokens] are where the hidden state that predicts them stands,
    targets [tokens] the tokens, sampler_logprobs [tokens] as recorded.
    """

    rollout_indices: tuple[int, ...]
    input_ids: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    sampler_logprobs: Tensor

    @property
    def num_tokens(self) -> int:
        """Loss tokens."""
        return self.targets.numel()


def plan(lengths: Sequence[int], max_padded_tokens: int) -> list[list[int]]:
    """Cut indices of `lengths` into micro-batches, longest first, each of at most `max_padded_tokens` with padding.

    A rollout longer than the budget stands alone. Every index appears once.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    parts: list[list[int]] = []
    for index in order:
        # The first of a part is its longest, so it sets the width.
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_padded_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def pack(rollouts: Sequence[Rollout], max_padded_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of the rollouts. Raises PackingError for a rollout without prompt tokens."""
    for rollout in rollouts:
        if not rollout.prompt_token_ids:
            raise PackingError(f"rollout {rollout.rollout_id} has no prompt, so nothing predicts its first token")
    lengths = [len(rollout.prompt_token_ids) + len(rollout.token_ids) - 1 for rollout in rollouts]
    return [_pad([rollouts[i] for i in part], part, device) for part in plan(lengths, max_padded_tokens)]


def _pad(rollouts: Sequence[Rollout], indices: Sequence[int], device: torch.device) -> MicroBatch:
    # The last token of a rollout predicts nothing that is in the loss, so it is not fed.
    inputs = [(rollout.prompt_token_ids + rollout.token_ids)[:-1] for rollout in rollouts]
    width = max(len(row) for row in inputs)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    for row, rollout in enumerate(rollouts):
        first = len(rollout.prompt_token_ids) - 1
        for offset, counts in enumerate(rollout.loss_mask):
            if counts:
                rows.append(row)
                columns.append(first + offset)
                targets.append(rollout.token_ids[offset])
                logprobs.append(rollout.logprobs[offset])
    return MicroBatch(
        rollout_indices=tuple(indices),
        input_ids=torch.tensor([[*row, *[_PAD_ID] * (width - len(row))] for row in inputs], device=device),
        rows=torch.tensor(rows, dtype=torch.long, device=device),
        columns=torch.tensor(columns, dtype=torch.long, device=device),
        targets=torch.tensor(targets, dtype=torch.long, device=device),
        sampler_logprobs=torch.tensor(logprobs, dtype=torch.float32, device=device),
    )
