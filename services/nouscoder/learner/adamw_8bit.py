"""AdamW whose moments take 2 bytes a weight in place of 8 (block_quantisation.py).

Each step reads the moments, changes them in float32 by the formula of AdamW (arXiv 1711.05101), changes the weight,
and writes the moments back in 8 bits. The second moment is stored as its square root. It then spans as many factors of
10 as the first, so no weight keeps its first moment and loses the second, by which it is divided.

Vectors (norms, biases) keep float32 moments: they are few, and their blocks would be single numbers.

INVARIANT: a step depends, bit for bit, only on weights, gradients, settings and `state`. The chance of a step comes
from its number, so a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from nouscoder.learner.block_quantisation import dequantise, num_blocks, quantise
from nouscoder.learner.ranks import own_part, zeros_by_rows

_EPS = 1e-8
_OF_VECTORS = frozenset({"step", "exp_avg", "exp_avg_sq"})
_OF_MATRICES = frozenset({"step", "exp_avg", "exp_avg_scale", "root_exp_avg_sq", "root_exp_avg_sq_scale"})


def state_names(weight: Tensor) -> frozenset[str]:
    """The names of the tensors in the state of a weight."""
    return _OF_VECTORS if weight.ndim < 2 else _OF_MATRICES


class AdamW8bit(Optimizer):
    """See the module. `state` of a matrix: step, exp_avg and root_exp_avg_sq (codes), and the scales of both."""

    def __init__(
        self, weights: Iterable[Parameter], learning_rate: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(weights, {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change every weight that has a gradient."""
        assert closure is None, "the gradients must be there already"
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state.update(_new_state(weight))
                    state["step"] += 1
                    self._change(weight, group, state, number)

    def _change(self, weight: Tensor, group: dict[str, Any], state: dict[str, Tensor], number: int) -> None:
        mine = {name: own_part(tensor) for name, tensor in state.items()}
        if not own_part(weight).numel():  # more ranks than rows
            return
        first, second = _moments(mine)
        own, gradient = own_part(weight), own_part(weight.grad).float()  # type: ignore[arg-type]
        (beta1, beta2), steps, rate = group["betas"], float(state["step"]), group["lr"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        own.mul_(1 - rate * group["weight_decay"])
        divisor = (second / (1 - beta2**steps)).sqrt_().add_(_EPS)
        own.addcdiv_(first, divisor, value=-rate / (1 - beta1**steps))
        if "exp_avg_scale" in mine:
            chance = torch.Generator(own.device).manual_seed(int(steps) * 2**20 + number)
            quantise(first, mine["exp_avg"], mine["exp_avg_scale"], signed=True, chance=chance)
            roots = second.sqrt_()
            quantise(roots, mine["root_exp_avg_sq"], mine["root_exp_avg_sq_scale"], signed=False, chance=chance)


def _new_state(weight: Tensor) -> dict[str, Tensor]:
    """Zero moments of a weight, divided among ranks as the weight is."""
    step = torch.zeros((), dtype=torch.float32)
    if weight.ndim < 2:
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
    blocks = (weight.shape[0], num_blocks(weight.shape))
    return {
        "step": step,
        "exp_avg": zeros_by_rows(weight, weight.shape, torch.uint8),
        "exp_avg_scale": zeros_by_rows(weight, blocks, torch.float32),
        "root_exp_avg_sq": zeros_by_rows(weight, weight.shape, torch.uint8),
        "root_exp_avg_sq_scale": zeros_by_rows(weight, blocks, torch.float32),
    }


def _moments(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The first and the second moment in float32. Those of vectors are the stored tensors themselves."""
    if "exp_avg_sq" in state:
        return state["exp_avg"], state["exp_avg_sq"]
    first = dequantise(state["exp_avg"], state["exp_avg_scale"], signed=True)
    roots = dequantise(state["root_exp_avg_sq"], state["root_exp_avg_sq_scale"], signed=False)
    return first, roots.square_()
