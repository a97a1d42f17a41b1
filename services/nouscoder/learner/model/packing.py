"""Micro-batches: rollouts packed one after another in one row, within a budget of tokens, without padding.

Each rollout's positions start from 0, and attention stays inside it, so a rollout has the same scores as alone.

A model whose attention is not one of ours cannot have packed rows. Its rows have one sequence each, and it computes
them as transformers does (`packs`).

Rollouts of a group begin with the same prompt. With `shares_prompts` a row holds each prompt once, before the sampled
tokens of its first rollout. Attention puts the whole sequences together again, and the gradients of all of them add up
at the prompt. So no other layer computes a prompt twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nouscoder.domain.rollout import Rollout
from nouscoder.learner.model.experts import RowExperts
from nouscoder.learner.model.packed_attention import Layout, RowLayout


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rollouts of one forward pass.

    rollout_indices [rollouts]: positions in the sequence given to `pack`. input_ids and position_ids [1, length] are
    the row, and `layout` is where its rollouts are. The others hold the loss tokens, in order: rollout_of_token
    [tokens] counts the rollouts of the row from 0, positions [tokens] are the places in the row of the hidden states
    that predict them, targets [tokens] their ids, sampler_logprobs [tokens] their recorded log-probabilities,
    temperatures [tokens] the sampling temperatures. `experts` are those to be used again; None: the router chooses.
    """

    rollout_indices: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    layout: Layout
    rollout_of_token: Tensor
    positions: Tensor
    targets: Tensor
    sampler_logprobs: Tensor
    temperatures: Tensor
    experts: RowExperts | None = None

    @property
    def num_tokens(self) -> int:
        """Loss tokens."""
        return self.targets.numel()


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divide the indices of `lengths` into rows of at most `max_tokens`: first fit, longest first.

    A rollout longer than the budget has its own row. Every index appears once.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row, left in enumerate(room) if lengths[index] <= left), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(max_tokens)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def pack(
    rollouts: Sequence[Rollout], max_tokens: int, device: torch.device, *, shares_prompts: bool = False
) -> list[MicroBatch]:
    """Micro-batches of the rollouts, see `plan` and `pack_row`."""
    rows = plan(input_lengths(rollouts), max_tokens)
    return [pack_row(rollouts, row, device, shares_prompts=shares_prompts) for row in rows]


def input_lengths(rollouts: Sequence[Rollout]) -> list[int]:
    """The tokens of each rollout in a row. Its last token predicts no loss token, so it is not an input."""
    return [len(rollout.token_ids) - 1 for rollout in rollouts]


def pack_row(
    rollouts: Sequence[Rollout],
    indices: Sequence[int],
    device: torch.device,
    *,
    replays_experts: bool = False,
    shares_prompts: bool = False,
) -> MicroBatch:
    """The micro-batch of the rollouts at `indices`; without any, a row of one token and without loss tokens.

    With `replays_experts` it has their recorded experts, with `shares_prompts` each prompt once. Raises ValueError for
    temperature 0: such tokens have no importance ratio.
    """
    if not indices:
        return _empty_row(device)
    rollouts = [rollouts[index] for index in indices]
    for rollout in rollouts:
        if rollout.sampling.temperature <= 0:
            raise ValueError(
                f"rollout {rollout.rollout_id} was sampled at temperature 0: train on a temperature above 0"
            )
    lengths = input_lengths(rollouts)
    tokens = [np.frombuffer(rollout.token_ids, np.int32) for rollout in rollouts]
    sampled = [_sampled_positions(rollout) for rollout in rollouts]
    places, own = _places(
        [ids[: where[0]] for ids, where in zip(tokens, sampled, strict=True)], lengths, shares_prompts
    )
    num_sampled = [len(where) for where in sampled]
    temperatures = np.array([rollout.sampling.temperature for rollout in rollouts], dtype=np.float32)

    def row(parts: Sequence[npt.NDArray[np.generic]], kind: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(kind)).to(device)

    return MicroBatch(
        rollout_indices=tuple(indices),
        input_ids=row([ids[first:-1] for ids, first in zip(tokens, own, strict=True)], np.int64).unsqueeze(0),
        position_ids=row([np.arange(*ends) for ends in zip(own, lengths, strict=True)], np.int64).unsqueeze(0),
        layout=RowLayout.of(lengths, device, [torch.from_numpy(where) for where in places]),
        rollout_of_token=row([np.repeat(np.arange(len(rollouts)), num_sampled)], np.int64),
        positions=row([place[where - 1] for place, where in zip(places, sampled, strict=True)], np.int64),
        targets=row([ids[where] for ids, where in zip(tokens, sampled, strict=True)], np.int64),
        sampler_logprobs=row([np.frombuffer(item.logprobs.cast("B"), np.float32) for item in rollouts], np.float32),
        temperatures=row([np.repeat(temperatures, num_sampled)], np.float32),
        experts=RowExperts.of(rollouts, lengths) if replays_experts else None,
    )


def _places(
    prompts: Sequence[npt.NDArray[np.int32]], lengths: Sequence[int], shares_prompts: bool
) -> tuple[list[npt.NDArray[np.int64]], list[int]]:
    """Where the tokens of each rollout are in the row, [length] each, and the first of them that it has for itself."""
    known: dict[bytes, npt.NDArray[np.int64]] = {}
    places: list[npt.NDArray[np.int64]] = []
    own: list[int] = []
    end = 0
    for prompt, length in zip(prompts, lengths, strict=True):
        shared = known.get(prompt.tobytes(), np.zeros(0, np.int64))
        own.append(len(shared))
        place = np.concatenate([shared, np.arange(end, end + length - len(shared))])
        end += length - len(shared)
        places.append(place)
        if shares_prompts:
            known[prompt.tobytes()] = place[: len(prompt)]
    return places, own


def _empty_row(device: torch.device) -> MicroBatch:
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    indices, numbers = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    return MicroBatch((), one, one, RowLayout.of([1], device), indices, indices, indices, numbers, numbers)


def _sampled_positions(rollout: Rollout) -> npt.NDArray[np.int64]:
    """The positions of the sampled tokens in `token_ids`, [sampled tokens]. Never 0, because the prompt comes first."""
    return np.concatenate([np.arange(start, end) for start, end in rollout.sampled_ranges()])
