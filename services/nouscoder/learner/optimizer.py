"""The optimizer of the learner's section: AdamW with the moments that it asks for, or Muon with AdamW.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101. adamw_8bit.py has the one with
moments of 8 bits.

Muon (K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024) is for the matrices of the decoder
layers, with AdamW for embeddings, head, norms and biases, as one optimizer. It orthogonalises the momentum of each
matrix by five Newton-Schulz steps; torch.optim.Muon has the formula. Its learning rate follows AdamW's, by a fixed
factor, so that one schedule holds for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from nouscoder.config import LearnerSection, OptimizerKind, OptimizerStates
from nouscoder.learner.adamw_8bit import AdamW8bit

_OF_MATRICES = frozenset({"step", "exp_avg", "exp_avg_scale", "root_exp_avg_sq", "root_exp_avg_sq_scale"})

_MUON_MATRICES = frozenset({"momentum_buffer"})


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
        self.matrices = {id(weight) for weight in matrices}
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


_OF_TORCH = frozenset({"step", "exp_avg", "exp_avg_sq"})


def optimizer_of(settings: LearnerSection, model: PreTrainedModel) -> Optimizer:
    """The optimizer of those weights of the model that are not frozen.

    With OptimizerStates.CPU the masters are in the CPU's memory (computation.py), so torch keeps the moments there too.
    Raises ValueError for Muon with weights that several ranks divide.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if settings.optimizer is OptimizerKind.MUON:
        if any(isinstance(weight, DTensor) for weight in trained):
            raise ValueError("learner.optimizer muon needs whole matrices: train on one rank, or take adamw")
        ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[no-untyped-call]
        at_the_ends = {id(weight) for end in ends if end is not None for weight in end.parameters()}
        inner = [weight for weight in trained if weight.ndim == 2 and id(weight) not in at_the_ends]
        chosen = {id(weight) for weight in inner}
        return MuonAdamW(inner, [weight for weight in trained if id(weight) not in chosen], settings)
    if settings.optimizer_states is OptimizerStates.EIGHT_BIT:
        return AdamW8bit(trained, settings.learning_rate, settings.adam_betas, settings.weight_decay)
    return AdamW(
        trained,
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        weight_decay=settings.weight_decay,
        # On a GPU one kernel changes weights and moments in place, without copies of all moments.
        **({"fused": True} if all(weight.device.type == "cuda" for weight in trained) else {"foreach": True}),
    )


def _names_of(optimizer: Optimizer, weight: Tensor) -> frozenset[str]:
    """The names of the tensors in the state of a weight."""
    if isinstance(optimizer, MuonAdamW) and id(weight) in optimizer.matrices:
        return _MUON_MATRICES
    return _OF_MATRICES if isinstance(optimizer, AdamW8bit) and weight.ndim >= 2 else _OF_TORCH


def put_states(optimizer: Optimizer, states: Mapping[int, dict[str, Tensor]]) -> None:
    """Give each weight, by its number, the state in `states`. Raises ValueError when they are of another optimizer."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if states.keys() - set(range(len(weights))):
        raise ValueError(f"the optimizer has {len(weights)} weights, and the states are of more")
    optimizer.state.clear()
    # The number of the step is on the CPU, except for a fused kernel.
    stays = () if optimizer.param_groups[0].get("fused") else ("step",)
    for number, state in states.items():
        weight = weights[number]
        if state.keys() != _names_of(optimizer, weight):
            raise ValueError(
                "the optimizer's states are of another learner.optimizer or learner.optimizer_states: put back the"
                " earlier one"
            )
        optimizer.state[weight] = {
            name: tensor if name in stays else tensor.to(weight.device) for name, tensor in state.items()
        }
