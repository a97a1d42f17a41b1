"""Activation checkpointing changes what is kept for the backward pass, and no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from nouscoder.config import ActivationCheckpointing
from nouscoder.learner.model.decoder_layers import checkpoint_activations
from nouscoder.learner.model.logprobs import score_tokens
from nouscoder.learner.model.packing import pack
from nouscoder.learner.model.synthetic import random_batch, random_policy

ROLLOUTS = [graded.rollout for graded in random_batch(0, seed=2).rollouts]


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts attention."""

    attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attention += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def measured(kind: ActivationCheckpointing, num_layers: int = 0) -> tuple[list[Tensor], int, int]:
    """(gradients, elements kept outside of checkpoints, matrix products)."""
    model = random_policy(0, num_layers=3)
    checkpoint_activations(model, kind, num_layers)
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    products = Products()  # type: ignore[no-untyped-call]
    with products:
        for part in pack(ROLLOUTS, 200, torch.device("cpu")):
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                scores = score_tokens(model, part, entropy_gradient=True)
            torch.autograd.backward((scores.logprobs + scores.entropies).sum())
    return [p.grad for p in model.parameters() if p.grad is not None], kept, products.count


@pytest.mark.parametrize("kind", [kind for kind in ActivationCheckpointing if kind is not ActivationCheckpointing.NONE])
def test_gradients_are_the_same_and_less_is_kept(kind: ActivationCheckpointing) -> None:
    plain, plain_kept, plain_products = measured(ActivationCheckpointing.NONE)
    gradients, kept, products = measured(kind)
    for one, other in zip(gradients, plain, strict=True):
        assert torch.equal(one, other)
    assert kept < plain_kept / 2
    again = products - plain_products
    assert again == 0 if kind is ActivationCheckpointing.SELECTIVE else again > 0, "products are computed again"


@pytest.mark.parametrize("kind", [ActivationCheckpointing.ATTENTION, ActivationCheckpointing.SELECTIVE])
def test_kept_attention_is_not_computed_again(kind: ActivationCheckpointing) -> None:
    def calls(kind: ActivationCheckpointing) -> int:
        operations = Operations()  # type: ignore[no-untyped-call]
        with operations:
            measured(kind)
        return operations.attention

    once = calls(ActivationCheckpointing.NONE)
    assert calls(kind) == once > 0
    assert calls(ActivationCheckpointing.FULL) == 2 * once


def test_only_the_first_layers_are_checkpointed() -> None:
    plain, none, few_products = measured(ActivationCheckpointing.NONE)
    gradients, some, more_products = measured(ActivationCheckpointing.FULL, 1)
    _gradients, least, most_products = measured(ActivationCheckpointing.FULL)
    assert none > some > least
    assert few_products < more_products < most_products
    for one, other in zip(gradients, plain, strict=True):
        assert torch.equal(one, other)


def test_offloaded_inputs_of_layers_are_not_kept_on_the_device() -> None:
    assert measured(ActivationCheckpointing.OFFLOADED)[1] < measured(ActivationCheckpointing.FULL)[1]
