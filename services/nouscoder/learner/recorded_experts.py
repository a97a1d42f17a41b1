"""The recorded experts of the rollouts of a row, for router replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nouscoder.domain.rollout import Rollout

NOT_RECORDED = -1
Ids = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class RowExperts:
    """Views of the records, [recorded tokens, layers, top_k] of each rollout, and how many tokens it has in the row.

    `positions` [tokens]: those of the row that are wanted, where several ranks share it; None: all. The views are
    copied only for a forward pass, because those of a whole batch may be larger than the memory.
    """

    recorded: tuple[Ids | None, ...]
    lengths: tuple[int, ...]
    positions: Tensor | None = None

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], lengths: Sequence[int]) -> RowExperts | None:
        """Those of rollouts of which `lengths` tokens are in the row. None when no rollout has a record."""
        recorded = tuple(map(_recorded, rollouts))
        return None if all(ids is None for ids in recorded) else cls(recorded, tuple(lengths))

    def at(self, positions: Tensor, padding: int) -> RowExperts:
        """Those of some positions of the row, which has `padding` more tokens at its end."""
        *others, last = self.lengths
        return RowExperts(self.recorded, (*others, last + padding), positions)

    def on(self, device: torch.device) -> Tensor:
        """The experts of each token, [length, layers, top_k]; NOT_RECORDED for tokens without a record."""
        (form,) = {ids.shape[1:] for ids in self.recorded if ids is not None}
        whole = np.full((sum(self.lengths), *form), NOT_RECORDED, dtype=np.int32)
        start = 0
        for ids, length in zip(self.recorded, self.lengths, strict=True):
            if ids is not None:
                whole[start : start + len(ids)] = ids
            start += length
        experts = torch.from_numpy(whole).to(device)
        return experts if self.positions is None else experts[self.positions]


def _recorded(rollout: Rollout) -> Ids | None:
    found = rollout.experts
    if found is None:
        return None
    return np.frombuffer(found.ids, found.ids.format).reshape(-1, found.num_layers, found.top_k)
