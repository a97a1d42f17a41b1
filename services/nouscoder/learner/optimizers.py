"""AdamW with the moments that learner.optimizer_states asks for.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from nouscoder.config import LearnerSection, OptimizerStates
from nouscoder.learner.adamw_8bit import AdamW8bit, state_names

_OF_TORCH = frozenset({"step", "exp_avg", "exp_avg_sq"})


def optimizer_of(settings: LearnerSection, weights: Iterable[Parameter]) -> Optimizer:
    """The optimizer of those weights that are not frozen.

    With OptimizerStates.CPU the masters are in the CPU's memory (precision.py), so torch keeps the moments there too.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    if settings.optimizer_states is OptimizerStates.EIGHT_BIT:
        return AdamW8bit(trained, settings.learning_rate, settings.adam_betas, settings.weight_decay)
    return AdamW(
        trained,
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        weight_decay=settings.weight_decay,
        foreach=True,
    )


def put_states(optimizer: Optimizer, states: Mapping[int, dict[str, Tensor]]) -> None:
    """Give each weight, by its number, the state in `states`. Raises ValueError when they are of another optimizer."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if states.keys() - set(range(len(weights))):
        raise ValueError(f"the optimizer has {len(weights)} weights, and the states are of more")
    optimizer.state.clear()
    for number, state in states.items():
        weight = weights[number]
        if state.keys() != (state_names(weight) if isinstance(optimizer, AdamW8bit) else _OF_TORCH):
            raise ValueError("the optimizer's states are of another learner.optimizer_states: put back the earlier one")
        optimizer.state[weight] = {
            name: tensor if name == "step" else tensor.to(weight.device) for name, tensor in state.items()
        }
