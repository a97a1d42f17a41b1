"""Log-probabilities and entropies of loss tokens under a causal language model of transformers.

Only hidden states that predict a loss token go through the head, at most `_MAX_LOGITS` logits at once, or
`_MAX_COMPILED_LOGITS` where the head is compiled.

With z = (W h + b) / T, log p = z - logsumexp(z) and H = - sum p log p, for the gradients g of log p_target and e of H:

    d/dz_j = g * ([j = target] - p_j) - e * p_j * (log p_j + H)

The forward pass keeps logsumexp(z) and H, [tokens] each. The backward pass computes the logits of each chunk again.

Some models change their logits after the head. A scale s (Cohere, Granite, Falcon-H1) is a temperature of T / s. A
soft cap c (Gemma 2, arXiv 2408.00118, section 2) makes z = c tanh((W h + b) / c) / T. Its derivative 1 - (z T / c)^2 is
a factor of the gradient. The configuration of a model says which, under one of a few names. A model whose head does
anything else is refused (admission.py).

INVARIANT: no tensor has more than `chunk_tokens` times the vocabulary elements, except the gradient of W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from nouscoder.learner.model.packing import MicroBatch, attend_alone, last_states
from nouscoder.learner.parallel.context_parallel import DistributedRow, part_of

# The head: from hidden states, chunk by chunk, without the logits of all tokens at once.


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
    logits = chunk.logits.to(_exact(chunk.logits)) / chunk.temperatures.unsqueeze(-1)
    normalisers = logits.logsumexp(-1)
    logprobs = logits - normalisers.unsqueeze(-1)
    chosen = logprobs.gather(-1, chunk.targets.unsqueeze(-1)).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1), normalisers


def _scores_in_place(chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """The same with one tensor fewer of the size of the logits, where nothing is compiled."""
    logits = chunk.logits.to(_exact(chunk.logits)).div_(chunk.temperatures.unsqueeze(-1))
    normalisers = logits.logsumexp(-1)
    logits.sub_(normalisers.unsqueeze(-1))
    chosen = logits.gather(-1, chunk.targets.unsqueeze(-1)).squeeze(-1)
    return chosen, -logits.exp().mul_(logits).sum(-1), normalisers


def _gradient(
    chunk: _Chunk, normalisers: Tensor, entropies: Tensor, of_logprobs: Tensor, of_entropies: Tensor | None
) -> Tensor:
    """The gradient of the logits of a chunk, in their type."""
    exact = chunk.logits.to(_exact(chunk.logits)) / chunk.temperatures.unsqueeze(-1)
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
    logprobs = chunk.logits.to(_exact(chunk.logits)).div_(chunk.temperatures.unsqueeze(-1))
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
        logprobs = torch.empty(size, dtype=_exact(states), device=states.device)
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


def _exact(tensor: Tensor) -> torch.dtype:
    """The type of the arithmetic on logits: float32 or better."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(size: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, size, chunk_tokens)]


def _zeros(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, to be filled. Those that sum over chunks sum in float32 or better."""
    needs = ctx.needs_input_grad
    return (
        torch.zeros_like(states) if needs[0] else None,
        torch.zeros_like(weight, dtype=_exact(weight)) if needs[1] else None,
        torch.zeros_like(bias, dtype=_exact(bias)) if bias is not None and needs[2] else None,
    )


# The loss tokens of a model.


@contextmanager
def attending_alone(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model uses transformers' own attention."""
    attention = model.config._attn_implementation
    attend_alone(model)
    try:
        yield
    finally:
        if attention != model.config._attn_implementation:
            model.set_attn_implementation(attention)


_MAX_LOGITS = 2**26  # 256 MiB of float32
_MAX_COMPILED_LOGITS = 2**28  # 512 MiB of bfloat16: what is compiled has no logits in float32


@dataclass(frozen=True, slots=True)
class Head:
    """A linear head, and what the model does with its logits: they are scaled, or soft-capped (0: not)."""

    layer: nn.Linear
    scale: float
    cap: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """The head of the model. Raises ValueError when it is not linear."""
        layer: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"its head is a {type(layer).__name__}, and only a linear head is supported")
        config = model.config.get_text_config()
        scale = _number(config, "logit_scale", 1.0) * _number(config, "lm_head_multiplier", 1.0)
        caps = (_number(config, name, 0.0) for name in _CAPS)
        return cls(layer, scale / _number(config, "logits_scaling", 1.0), max(caps))


_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def _number(config: Any, name: str, default: float) -> float:
    found = getattr(config, name, None)
    return float(found) if isinstance(found, (int, float)) and found else default


class Scorer(nn.Module):
    """`score_tokens` as the root of all forward passes. The ranks of a `row` hold each micro-batch together."""

    def __init__(self, model: PreTrainedModel, row: DistributedRow | None = None, *, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self._row = row
        self._score = partial(score_tokens, compiled=compiled)

    def forward(self, micro_batch: MicroBatch, entropy_gradient: bool) -> TokenScores:
        """The scores of the micro-batch."""
        if self._row is None:
            return self._score(self.model, micro_batch, entropy_gradient=entropy_gradient)
        part = part_of(micro_batch, self._row)
        scores = self._score(self.model, part.micro_batch, entropy_gradient=entropy_gradient)
        logprobs, entropies = self._row.gather_scores(torch.stack(scores), part.owners).unbind()
        return TokenScores(logprobs, entropies if entropy_gradient else entropies.detach())

    def own_logprobs(self, token_ids: Tensor) -> Tensor:
        """The log-probability of each token of a sequence but the first, [tokens - 1], by the model's own forward pass.

        token_ids [tokens]. Attention and head are those of transformers.
        """
        with attending_alone(self.model):
            logits = self.model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        logprobs: Tensor = logits.to(_exact(logits)).log_softmax(-1)
        return logprobs.gather(-1, token_ids[1:].unsqueeze(-1)).squeeze(-1)


class TokenScores(NamedTuple):
    """The scores of the loss tokens of a micro-batch: logprobs [tokens] with gradient, entropies [tokens] in nats.

    A tuple, because FSDP looks for gradients in tuples.
    """

    logprobs: Tensor
    entropies: Tensor


def score_tokens(
    model: PreTrainedModel, micro_batch: MicroBatch, *, entropy_gradient: bool = False, compiled: bool = False
) -> TokenScores:
    """Scores under softmax(logits / temperature of the rollout), from which the tokens were sampled (at top-p 1).

    The entropies have a gradient only if `entropy_gradient`. `compiled`: the head is compiled too.
    Raises ValueError for a head that is not linear, and for several sequences under a model that does not pack them.
    """
    # An attention that ignores the layout finds the sequences by their positions, which start again from 0.
    experts = {} if micro_batch.experts is None else {"experts": micro_batch.experts.on(micro_batch.input_ids.device)}
    hidden = last_states(model, micro_batch.input_ids, micro_batch.position_ids, micro_batch.layout, **experts)
    head = Head.of(model)
    scores = fused_scores(
        # Mamba computes the last states in float32 also in bfloat16.
        hidden.index_select(0, micro_batch.positions).to(head.layer.weight.dtype),
        head.layer.weight,
        head.layer.bias,
        micro_batch.targets,
        micro_batch.temperatures / head.scale,
        chunk_tokens=max(1, (_MAX_COMPILED_LOGITS if compiled else _MAX_LOGITS) // head.layer.out_features),
        entropy_gradient=entropy_gradient,
        compiled=compiled,
        cap=head.cap,
    )
    return TokenScores(*scores)
