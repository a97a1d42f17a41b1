"""From hidden states to log-probabilities and entropies, chunk by chunk, without the logits of all tokens at once.

With z = (W h + b) / T, log p = z - logsumexp(z) and H = - sum p log p, for the gradients g of log p_target and e of H:

    d/dz_j = g * ([j = target] - p_j) - e * p_j * (log p_j + H)

The forward pass keeps logsumexp(z) and H, [tokens] each. The backward pass computes the logits of each chunk again.

INVARIANT: no tensor has more than `chunk_tokens` times the vocabulary elements, except the gradient of W.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _Chunk(NamedTuple):
    """The logits of a chunk before the temperature, [chunk, vocabulary], and what its tokens have, [chunk] each."""

    logits: Tensor
    targets: Tensor
    temperatures: Tensor


def fused_scores(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk_tokens: int,
    entropy_gradient: bool,
    compiled: bool = False,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), [tokens] each, in float32 or better; entropies in nats.

    states [tokens, hidden], weight [vocabulary, hidden], bias [vocabulary], targets [tokens], temperatures [tokens].
    The entropies have a gradient only if `entropy_gradient`. `compiled`: torch.compile makes one or two passes over the
    logits of what else takes ten. `cap`: the soft cap of the logits; 0: none.
    """
    scores: tuple[Tensor, Tensor] = _FusedScores.apply(  # type: ignore[no-untyped-call]
        states, weight, bias, targets, temperatures, chunk_tokens, entropy_gradient, compiled, cap
    )
    return scores


def _capped(logits: Tensor, cap: float) -> Tensor:
    """c tanh(logits / c) of new logits, in their type."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _slope(capped: Tensor, cap: float) -> Tensor | float:
    """The derivative of c tanh(logits / c), from its value."""
    return 1 - (capped / cap) ** 2 if cap else 1.0


def _scores(chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and normalisers, [chunk] each."""
    logits = chunk.logits.to(exact_type(chunk.logits)) / chunk.temperatures.unsqueeze(-1)
    normalisers = logits.logsumexp(-1)
    logprobs = logits - normalisers.unsqueeze(-1)
    chosen = logprobs.gather(-1, chunk.targets.unsqueeze(-1)).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1), normalisers


def _scores_in_place(chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """The same with one tensor fewer of the size of the logits, where nothing is compiled."""
    logits = chunk.logits.to(exact_type(chunk.logits)).div_(chunk.temperatures.unsqueeze(-1))
    normalisers = logits.logsumexp(-1)
    logits.sub_(normalisers.unsqueeze(-1))
    chosen = logits.gather(-1, chunk.targets.unsqueeze(-1)).squeeze(-1)
    return chosen, -logits.exp().mul_(logits).sum(-1), normalisers


def _gradient(
    chunk: _Chunk, normalisers: Tensor, entropies: Tensor, of_logprobs: Tensor, of_entropies: Tensor | None
) -> Tensor:
    """The gradient of the logits of a chunk, in their type."""
    exact = chunk.logits.to(exact_type(chunk.logits)) / chunk.temperatures.unsqueeze(-1)
    logprobs = exact - normalisers.unsqueeze(-1)
    of_chosen = (of_logprobs / chunk.temperatures).unsqueeze(-1)
    factor = of_chosen
    if of_entropies is not None:
        of_entropy = (of_entropies / chunk.temperatures).unsqueeze(-1)
        factor = (logprobs + entropies.unsqueeze(-1)) * of_entropy + of_chosen
    columns = torch.arange(exact.shape[1], device=exact.device)
    is_target = columns.unsqueeze(0) == chunk.targets.unsqueeze(-1)
    of_logits = torch.where(is_target, of_chosen, 0.0) - logprobs.exp() * factor
    return of_logits.to(chunk.logits.dtype)


def _gradient_in_place(
    chunk: _Chunk, normalisers: Tensor, entropies: Tensor, of_logprobs: Tensor, of_entropies: Tensor | None
) -> Tensor:
    """The same with fewer tensors of the size of the logits, where nothing is compiled."""
    logprobs = chunk.logits.to(exact_type(chunk.logits)).div_(chunk.temperatures.unsqueeze(-1))
    logprobs.sub_(normalisers.unsqueeze(-1))
    of_chosen = (of_logprobs / chunk.temperatures).unsqueeze(-1)
    probabilities = logprobs.exp()
    if of_entropies is not None:
        of_entropy = (of_entropies / chunk.temperatures).unsqueeze(-1)
        logprobs.add_(entropies.unsqueeze(-1)).mul_(of_entropy).add_(of_chosen)
        of_logits = probabilities.mul_(logprobs).neg_()
    else:
        of_logits = probabilities.mul_(-of_chosen)
    where = chunk.targets.unsqueeze(-1)
    of_logits.scatter_(-1, where, of_logits.gather(-1, where) + of_chosen)
    return of_logits.to(chunk.logits.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


class _FusedScores(Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        chunk_tokens: int,
        entropy_gradient: bool,
        compiled: bool,
        cap: float,
    ) -> tuple[Tensor, Tensor]:
        score = _compiled(_scores) if compiled else _scores_in_place
        size = len(targets)
        logprobs = torch.empty(size, dtype=exact_type(states), device=states.device)
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _chunks(size, chunk_tokens):
            logits = _capped(F.linear(states[part], weight, bias), cap)
            chunk = _Chunk(logits, targets[part], temperatures[part])
            logprobs[part], entropies[part], normalisers[part] = score(chunk)
        ctx.save_for_backward(states, weight, bias, targets, temperatures, normalisers, entropies)
        ctx.chunk_tokens, ctx.entropy_gradient, ctx.compiled, ctx.cap = chunk_tokens, entropy_gradient, compiled, cap
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, temperatures, normalisers, entropies = ctx.saved_tensors
        gradient = _compiled(_gradient) if ctx.compiled else _gradient_in_place
        of_states, of_weight, of_bias = _zeros(ctx, states, weight, bias)
        for part in _chunks(len(targets), ctx.chunk_tokens):
            logits = _capped(F.linear(states[part], weight, bias), ctx.cap)
            chunk = _Chunk(logits, targets[part], temperatures[part])
            of_entropies = gradients[1][part] if ctx.entropy_gradient else None
            slope = _slope(logits, ctx.cap)  # before the logits are overwritten
            of_logits = gradient(chunk, normalisers[part], entropies[part], gradients[0][part], of_entropies)
            of_logits = of_logits.mul_(slope) if ctx.cap else of_logits
            if of_bias is not None:
                of_bias += of_logits.sum(0, dtype=of_bias.dtype)
            if of_states is not None:
                of_states[part] = of_logits @ weight
            if of_weight is not None:
                of_weight += of_logits.T @ states[part]
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_states, of_weight, of_bias, None, None, None, None, None, None


def exact_type(tensor: Tensor) -> torch.dtype:
    """The type of the arithmetic on logits: float32 or better."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(size: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, size, chunk_tokens)]


def _zeros(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, to be filled. Those that sum over chunks sum in float32 or better."""
    needs = ctx.needs_input_grad
    return (
        torch.zeros_like(states) if needs[0] else None,
        torch.zeros_like(weight, dtype=exact_type(weight)) if needs[1] else None,
        torch.zeros_like(bias, dtype=exact_type(bias)) if bias is not None and needs[2] else None,
    )
