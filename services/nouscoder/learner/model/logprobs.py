"""Log-probabilities and entropies of loss tokens under a causal language model of transformers.

Only hidden states that predict a loss token go through the head, at most `_MAX_LOGITS` logits at once, or
`_MAX_COMPILED_LOGITS` where the head is compiled. fused_scores.py has the formulas.

Some models change their logits after the head. A scale s (Cohere, Granite, Falcon-H1) is a temperature of T / s. A
soft cap c (Gemma 2, arXiv 2408.00118, section 2) makes z = c tanh((W h + b) / c) / T. Its derivative 1 - (z T / c)^2 is
a factor of the gradient. The configuration of a model says which, under one of a few names. A model whose head does
anything else is refused (admission.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nouscoder.learner.model.fused_scores import exact_type, fused_scores
from nouscoder.learner.model.packed_attention import attend_alone, last_states
from nouscoder.learner.model.packing import MicroBatch
from nouscoder.learner.parallel.context_parallel import DistributedRow, part_of


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
        logprobs: Tensor = logits.to(exact_type(logits)).log_softmax(-1)
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
