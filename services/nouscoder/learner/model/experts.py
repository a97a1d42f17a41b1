"""Router replay: each layer with experts uses the experts that generation recorded, with the weights of today's router.

"Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370 (R3). With the
router's logits z of a token, the recorded experts E and p = softmax(z), expert e of E counts

    p_e / sum of p_i over i in E        (p_e alone when the model's norm_topk_prob is off)

so the router still learns. Where E is what the router would choose, this is the plain forward pass. A token without a
record has the experts of the router. Nothing is added to the loss for a balanced load of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nouscoder.domain.rollout import Rollout
from nouscoder.policy_folder.policy_tensors import routers_of

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


def replay_experts(model: PreTrainedModel) -> None:
    """Have the layers take `experts` [length, layers, top_k] as an argument of the forward pass. Names stay.

    Call it once, before activation checkpointing, which then keeps the argument for the second pass. Raises
    ValueError for a model without experts.
    """
    routers: Any = routers_of(model)
    if not routers:
        raise ValueError(f"policy.router_replay needs a policy with experts, and this is a {type(model).__name__}")
    layers = [layer for layer in model.base_model.layers if routers_of(layer)]  # type: ignore[union-attr]
    for number, (layer, router) in enumerate(zip(layers, routers, strict=True)):
        replay = _Replay(router, number, len(layers))
        layer.forward = partial(replay.of_layer, layer.forward)
        router.register_forward_hook(replay.of_router)


class _Replay:
    """The replay in one layer. `_chosen` [length, top_k] is set only during a forward pass of the layer."""

    def __init__(self, router: Any, number: int, num_layers: int) -> None:
        self._router = router
        self._number = number
        self._form = (num_layers, int(router.top_k))
        self._chosen: Tensor | None = None

    def of_layer(self, forward: Callable[..., Any], *inputs: Any, experts: Tensor | None = None, **more: Any) -> Any:
        if experts is not None:
            if experts.shape[1:] != self._form:
                raise ValueError(
                    f"{[*experts.shape[1:]]} experts are recorded for a token, the policy has {[*self._form]}"
                )
            self._chosen = experts[:, self._number].long()
        try:
            return forward(*inputs, **more)
        finally:
            self._chosen = None

    def of_router(
        self, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The router's output (logits, weights of the experts, experts) with the recorded experts."""
        if self._chosen is None:
            return None
        logits, _, own = output
        chosen = torch.where(self._chosen == NOT_RECORDED, own, self._chosen)
        weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, chosen)
        if self._router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen
