"""Muon for the matrices of the decoder layers, AdamW for embeddings, head, norms and biases, as one optimizer.

Muon (K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024) orthogonalises the momentum of each
matrix by five Newton-Schulz steps; torch.optim.Muon has the formula. Its learning rate follows AdamW's, by a fixed
factor, so that one schedule holds for both.

INVARIANT: `state` holds everything that a step depends on besides weights, gradients and settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer

from nouscoder.config import LearnerSection

_OF_MATRICES = frozenset({"momentum_buffer"})


class MuonAdamW(Optimizer):
    """See the module. The learning rate of its groups is AdamW's; `rate_factor` times it is that of the matrices."""

    def __init__(self, matrices: Sequence[Parameter], others: Sequence[Parameter], settings: LearnerSection) -> None:
        shared: dict[str, Any] = {
            "lr": settings.learning_rate,
            "betas": settings.adam_betas,
            "weight_decay": settings.weight_decay,
        }
        factor = settings.matrix_learning_rate / settings.learning_rate
        # Adapters are matrices only, and then AdamW has nothing to train.
        groups = [(weights, rate) for weights, rate in ((matrices, factor), (others, 1.0)) if weights]
        super().__init__([{"params": [*weights], "rate_factor": rate} for weights, rate in groups], shared)
        self._matrices = {id(weight) for weight in matrices}
        parts: list[Optimizer] = [Muon(matrices)] if matrices else []
        self._parts = [*parts, AdamW(others, foreach=True)] if others else parts
        for part in self._parts:
            part.state = self.state  # one state for a checkpoint

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change every weight that has a gradient."""
        assert closure is None, "the gradients must be there already"
        for part, group in zip(self._parts, self.param_groups, strict=True):
            own = part.param_groups[0]
            own.update(lr=group["lr"] * group["rate_factor"], weight_decay=group["weight_decay"])
            if "betas" in own:
                own["betas"] = group["betas"]
            part.step()

    def state_names(self, weight: Tensor, of_adamw: frozenset[str]) -> frozenset[str]:
        """The names of the tensors in the state of a weight."""
        return _OF_MATRICES if id(weight) in self._matrices else of_adamw
