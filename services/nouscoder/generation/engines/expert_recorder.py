"""Records which experts a mixture-of-experts model chooses, for router replay (R3, arXiv 2510.11370).

INVARIANT: `take` returns the choices of exactly the last forward pass, one for each of its tokens and layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nouscoder.domain.expert_choices import ExpertChoices
from nouscoder.policy_folder.policy_tensors import routers_of

Choices = npt.NDArray[np.unsignedinteger[Any]]


class ExpertRecorder:
    """Listens to the routers of a model. Raises ValueError for a model without experts."""

    def __init__(self, model: nn.Module) -> None:
        routers: Any = routers_of(model)
        if not routers:
            raise ValueError("policy.router_replay needs a policy with experts (qwen3_moe)")
        self._num_layers = len(routers)
        self._type = np.uint8 if routers[0].num_experts <= 256 else np.uint16
        self._chosen: list[Tensor] = []
        for router in routers:
            router.register_forward_hook(self._keep)

    def _keep(self, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if len(self._chosen) == self._num_layers:  # of a pass that nobody asked about
            self._chosen = []
        self._chosen.append(output[2])

    def take(self, *shape: int) -> Choices:
        """Those of the last pass, [*shape, layers, top_k]: `shape` is that of its tokens."""
        chosen, self._chosen = torch.stack(self._chosen, dim=1), []
        array: Choices = chosen.cpu().numpy().astype(self._type)
        return array.reshape(*shape, *array.shape[1:])


def expert_choices(parts: Sequence[Choices]) -> ExpertChoices | None:
    """Those [positions, layers, top_k] of consecutive positions, as a completion has them. None when there are none."""
    if not parts:
        return None
    whole = np.concatenate(parts)
    num_layers, top_k = whole.shape[1:]
    return ExpertChoices(whole.reshape(-1).data, num_layers, top_k)
