"""Log-probabilities and entropies of tokens from hidden states, without the logits of all tokens at once.

With z = (W h + b) / T, log p = z - logsumexp(z) and H = - sum p log p, for the gradients g of log p_target and e of H:

    d/dz_j = g * ([j = target] - p_j) - e * p_j * (log p_j + H)

The forward pass keeps logsumexp(z) and H, [tokens] each. The backward pass computes the logits of each chunk again.

INVARIANT: no tensor has more than `chunk_tokens` times the vocabulary elements, except the gradient of W.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def fused_scores(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk_tokens: int,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), [tokens] each, in float32 or better; entropies in nats.

    states [tokens, hidden], weight [vocabulary, hidden], bias [vocabulary], targets [tokens], temperatures [tokens].
    The entropies have a gradient only if `entropy_gradient`.
    """
    scores: tuple[Tensor, Tensor] = _FusedScores.apply(  # type: ignore[no-untyped-call]
        states, weight, bias, targets, temperatures, chunk_tokens, entropy_gradient
    )
    return scores


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
    ) -> tuple[Tensor, Tensor]:
        size = len(targets)
        logprobs = torch.empty(size, dtype=_exact(states), device=states.device)
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _chunks(size, chunk_tokens):
            logits = _logits(states[part], weight, bias, temperatures[part])
            normalisers[part] = logits.logsumexp(-1)
            logits.sub_(normalisers[part].unsqueeze(-1))
            logprobs[part] = logits.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
            entropies[part] = -logits.exp().mul_(logits).sum(-1)
        ctx.save_for_backward(states, weight, bias, targets, temperatures, normalisers, entropies)
        ctx.chunk_tokens, ctx.entropy_gradient = chunk_tokens, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, temperatures, normalisers, entropies = ctx.saved_tensors
        of_states, of_weight, of_bias = _zeros(ctx, states, weight, bias)
        for part in _chunks(len(targets), ctx.chunk_tokens):
            logprobs = _logits(states[part], weight, bias, temperatures[part])
            logprobs.sub_(normalisers[part].unsqueeze(-1))
            of_chosen = (gradients[0][part] / temperatures[part]).unsqueeze(-1)
            probabilities = logprobs.exp()
            if ctx.entropy_gradient:
                of_entropy = (gradients[1][part] / temperatures[part]).unsqueeze(-1)
                logprobs.add_(entropies[part].unsqueeze(-1)).mul_(of_entropy).add_(of_chosen)
                of_logits = probabilities.mul_(logprobs).neg_()
            else:
                of_logits = probabilities.mul_(-of_chosen)
            where = targets[part].unsqueeze(-1)
            of_logits.scatter_(-1, where, of_logits.gather(-1, where) + of_chosen)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            of_logits = of_logits.to(weight.dtype)
            if of_states is not None:
                of_states[part] = of_logits @ weight
            if of_weight is not None:
                of_weight += of_logits.T @ states[part]
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_states, of_weight, None if of_bias is None else of_bias.to(bias.dtype), None, None, None, None


def _exact(tensor: Tensor) -> torch.dtype:
    """The type of the arithmetic on logits: float32 or better."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(size: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, size, chunk_tokens)]


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> Tensor:
    """New logits [chunk, vocabulary] at the temperatures of the tokens."""
    return F.linear(states, weight, bias).to(_exact(states)).div_(temperatures.unsqueeze(-1))


def _zeros(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, to be filled. Those that sum over chunks sum in float32 or better."""
    needs = ctx.needs_input_grad
    return (
        torch.zeros_like(states) if needs[0] else None,
        torch.zeros_like(weight, dtype=_exact(weight)) if needs[1] else None,
        torch.zeros_like(bias, dtype=_exact(bias)) if bias is not None and needs[2] else None,
    )
