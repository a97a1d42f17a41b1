"""The optimizer of the learner's section: AdamW with the moments that it asks for, or Muon with AdamW (muon.py).

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from nouscoder.config import LearnerSection, OptimizerKind, OptimizerStates
from nouscoder.learner.adamw_8bit import AdamW8bit, state_names
from nouscoder.learner.muon import MuonAdamW

_OF_TORCH = frozenset({"step", "exp_avg", "exp_avg_sq"})


def optimizer_of(settings: LearnerSection, model: PreTrainedModel) -> Optimizer:
    """The optimizer of those weights of the model that are not frozen.

    With OptimizerStates.CPU the masters are in the CPU's memory (precision.py), so torch keeps the moments there too.
    Raises ValueError for Muon with weights that several ranks divide.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if settings.optimizer is OptimizerKind.MUON:
        return _muon_of(settings, model, trained)
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


def _muon_of(settings: LearnerSection, model: PreTrainedModel, trained: list[Parameter]) -> MuonAdamW:
    if any(isinstance(weight, DTensor) for weight in trained):
        raise ValueError("learner.optimizer muon needs whole matrices: train on one rank, or take adamw")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    at_the_ends = {id(weight) for end in ends if end is not None for weight in end.parameters()}
    inner = [weight for weight in trained if weight.ndim == 2 and id(weight) not in at_the_ends]
    chosen = {id(weight) for weight in inner}
    return MuonAdamW(inner, [weight for weight in trained if id(weight) not in chosen], settings)


def _names_of(optimizer: Optimizer, weight: Tensor) -> frozenset[str]:
    """The names of the tensors in the state of a weight."""
    if isinstance(optimizer, MuonAdamW):
        return optimizer.state_names(weight, _OF_TORCH)
    return state_names(weight) if isinstance(optimizer, AdamW8bit) else _OF_TORCH


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
