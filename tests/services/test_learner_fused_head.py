"""Fused scores equal those of full logits, in values and gradients, and never hold the logits of all tokens."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nouscoder.learner.model.fused_scores import fused_scores

TOKENS, HIDDEN, VOCABULARY, CHUNK = 300, 24, 1000, 16


def inputs(dtype: torch.dtype, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> list[Tensor]:
    """States, weight, bias, targets, temperatures."""
    random = torch.Generator().manual_seed(0)
    shapes = ((tokens, HIDDEN), (vocabulary, HIDDEN), (vocabulary,))
    learned = [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(vocabulary, (tokens,), generator=random)
    return [*learned, targets, 0.5 + torch.rand(tokens, generator=random)]


def full_scores(states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = ((states @ weight.T + bias) / heat.unsqueeze(-1)).log_softmax(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def results(scores: tuple[Tensor, Tensor], learned: list[Tensor]) -> list[Tensor]:
    """Values, and gradients of a weighted sum of them."""
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(len(values), generator=random, dtype=values.dtype) for values in scores]
    loss = sum(((w * values).sum() for w, values in zip(weights, scores, strict=True)), torch.zeros(()))
    return [*(values.detach() for values in scores), *torch.autograd.grad(loss, learned)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("chunk", [1, CHUNK, TOKENS])
def test_fused_scores_and_their_gradients_equal_full_ones(dtype: torch.dtype, limit: float, chunk: int) -> None:
    tensors = inputs(dtype)
    fused = results(fused_scores(*tensors, chunk_tokens=chunk, entropy_gradient=True), tensors[:3])
    full = results(full_scores(*tensors), tensors[:3])
    for one, other in zip(fused, full, strict=True):
        assert float((one - other).norm() / other.norm()) < limit


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_what_is_compiled_is_the_same(monkeypatch: pytest.MonkeyPatch, entropy_gradient: bool) -> None:
    """The functions themselves: compiling them takes a minute, and test_learner_compilation.py does."""
    monkeypatch.setattr("nouscoder.learner.model.fused_scores._compiled", lambda function: function)
    tensors = inputs(torch.float64)
    found, expected = (
        fused_scores(*tensors, chunk_tokens=CHUNK, entropy_gradient=entropy_gradient, compiled=compiled)
        for compiled in (True, False)
    )
    if not entropy_gradient:
        found, expected = (found[0], found[0].detach()), (expected[0], expected[0].detach())
    for one, other in zip(results(found, tensors[:3]), results(expected, tensors[:3]), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-12


def test_entropies_have_a_gradient_only_when_it_is_asked_for() -> None:
    tensors = inputs(torch.float64)
    logprobs, entropies = fused_scores(*tensors, chunk_tokens=CHUNK, entropy_gradient=False)
    assert not entropies.requires_grad
    (gradient,) = torch.autograd.grad(logprobs.sum(), tensors[:1])
    (expected,) = torch.autograd.grad(full_scores(*tensors)[0].sum(), tensors[:1])
    torch.testing.assert_close(gradient, expected)


def test_no_tokens_have_no_scores_and_a_zero_gradient() -> None:
    tensors = inputs(torch.float32, tokens=0)
    logprobs, entropies = fused_scores(*tensors, chunk_tokens=CHUNK, entropy_gradient=True)
    assert logprobs.shape == entropies.shape == (0,)
    assert not any(bool(gradient.any()) for gradient in torch.autograd.grad(logprobs.sum(), tensors[:3]))


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of the tensors that operations return: of the largest one, and of all alive at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.peak = self._alive = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() // tensor.element_size()
        self.largest = max(self.largest, size)
        if key in self._storages:
            return
        self._storages.add(key)
        self._alive += size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._alive -= size


def measured(scores: Callable[..., tuple[Tensor, Tensor]], **more: Any) -> Allocations:
    tensors = inputs(torch.float32, tokens=1600, vocabulary=2000)
    allocations = Allocations()
    with allocations:
        results(scores(*tensors, **more), tensors[:3])
    return allocations


def test_no_tensor_holds_the_logits_of_all_tokens() -> None:
    chunk_logits, all_logits = CHUNK * 2000, 1600 * 2000
    fused = measured(fused_scores, chunk_tokens=CHUNK, entropy_gradient=True)
    gradient_of_weight = HIDDEN * 2000
    assert fused.largest == max(chunk_logits, gradient_of_weight)
    # A few chunks, the gradients of weight and states with one product each, and figures of one number a token.
    assert fused.peak < 5 * chunk_logits + 2 * gradient_of_weight + 2 * HIDDEN * 1600 + 12 * 1600
    full = measured(full_scores)
    assert full.largest == all_logits, "the measurement sees the logits of all tokens when they are held"
    assert full.peak > 10 * fused.peak


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_scores_of_65536_tokens_of_a_vocabulary_of_151936_take_less_than_2_gib_over_the_weights() -> None:
    tokens, vocabulary = 65536, 151936
    command = [sys.executable, str(Path(__file__).with_name("fused_head_peak.py")), str(tokens), str(vocabulary)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=3000).stdout)
    print(f"{tokens} tokens, vocabulary {vocabulary}: {grown / 2**30:.2f} GiB over the weights")
    print(f"their logits alone would be {tokens * vocabulary * 4 / 2**30:.1f} GiB")
    assert 256 * 2**20 < grown < 2 * 2**30, "at least one chunk of logits is held"
