"""Micro-batches: rollouts of similar length, padded on the right, within a budget of padded tokens.

Causal attention never attends to the right, so padding on the right changes nothing and needs no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nouscoder.domain.rollout import Rollout

_PAD_ID = 0  # any id is right, because no result depends on padding


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rollouts of one forward pass.

    rollout_indices [rows]: positions in the sequence given to `pack`. input_ids [rows, width]. The others hold the loss
    tokens, row by row and in order: rows [tokens] and columns [tokens] are the positions of the hidden states that
    predict them, targets [tokens] their ids, sampler_logprobs [tokens] their recorded log-probabilities, temperatures
    [tokens] the sampling temperatures.
    """

    rollout_indices: tuple[int, ...]
    input_ids: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    sampler_logprobs: Tensor
    temperatures: Tensor

    @property
    def num_tokens(self) -> int:
        """Loss tokens."""
        return self.targets.numel()


def plan(lengths: Sequence[int], max_padded_tokens: int) -> list[list[int]]:
    """Divide the indices of `lengths` into micro-batches of at most `max_padded_tokens` with padding, longest first.

    A rollout longer than the budget has its own micro-batch. Every index appears once.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    parts: list[list[int]] = []
    for index in order:
        # The first rollout of a part is its longest, so it sets the width.
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_padded_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def pack(rollouts: Sequence[Rollout], max_padded_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of the rollouts. Raises ValueError for temperature 0: such tokens have no importance ratio."""
    for rollout in rollouts:
        if rollout.sampling.temperature <= 0:
            raise ValueError(
                f"rollout {rollout.rollout_id} was sampled at temperature 0: train on a temperature above 0"
            )
    # The last token of a rollout predicts no loss token, so it is not an input.
    lengths = [len(rollout.token_ids) - 1 for rollout in rollouts]
    return [_pad([rollouts[i] for i in part], part, device) for part in plan(lengths, max_padded_tokens)]


def _pad(rollouts: Sequence[Rollout], indices: Sequence[int], device: torch.device) -> MicroBatch:
    width = max(len(rollout.token_ids) - 1 for rollout in rollouts)
    input_ids = np.full((len(rollouts), width), _PAD_ID, dtype=np.int64)
    positions = [_sampled_positions(rollout) for rollout in rollouts]
    for row, rollout in enumerate(rollouts):
        input_ids[row, : len(rollout.token_ids) - 1] = np.frombuffer(rollout.token_ids, np.int32)[:-1]
    targets = [np.frombuffer(r.token_ids, np.int32)[p] for r, p in zip(rollouts, positions, strict=True)]
    logprobs = [np.frombuffer(rollout.logprobs.cast("B"), np.float32) for rollout in rollouts]
    num_sampled = [len(where) for where in positions]
    rows = np.repeat(np.arange(len(rollouts)), num_sampled)
    temperatures = np.repeat(np.array([r.sampling.temperature for r in rollouts], dtype=np.float32), num_sampled)
    return MicroBatch(
        rollout_indices=tuple(indices),
        input_ids=torch.from_numpy(input_ids).to(device),
        rows=torch.from_numpy(rows).to(device),
        columns=torch.from_numpy(np.concatenate(positions) - 1).to(device),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        sampler_logprobs=torch.from_numpy(np.concatenate(logprobs)).to(device),
        temperatures=torch.from_numpy(temperatures).to(device),
    )


def _sampled_positions(rollout: Rollout) -> npt.NDArray[np.int64]:
    """The positions of the sampled tokens in `token_ids`, [sampled tokens]. Never 0, because the prompt comes first."""
    return np.concatenate([np.arange(start, end) for start, end in rollout.sampled_ranges()])
