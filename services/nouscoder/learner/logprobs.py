"""Log-probabilities and entropies of loss tokens under a causal language model of transformers.

Only hidden states that predict a loss token go through the head. At most `_MAX_LOGITS` logits are in memory at once.
For more tokens the head runs in chunks, and the backward pass computes the logits of each chunk again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from nouscoder.learner.packing import MicroBatch

_MAX_LOGITS = 2**26  # 256 MiB of float32


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of the loss tokens of a micro-batch: logprobs [tokens] with gradient, entropies [tokens] in nats."""

    logprobs: Tensor
    entropies: Tensor


def score_tokens(model: PreTrainedModel, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenScores:
    """Scores under softmax(logits / temperature of the rollout), from which the tokens were sampled (at top-p 1).

    The entropies have a gradient only if `entropy_gradient`.
    """
    hidden = model.base_model(input_ids=micro_batch.input_ids, use_cache=False).last_hidden_state
    states = hidden[micro_batch.rows, micro_batch.columns]
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    chunk_tokens = max(1, _MAX_LOGITS // model.config.vocab_size)
    inputs = (states, micro_batch.targets, micro_batch.temperatures)
    if len(states) <= chunk_tokens:
        return TokenScores(*_head_scores(head, *inputs, entropy_gradient))
    parts = zip(*(torch.split(tensor, chunk_tokens) for tensor in inputs), strict=True)
    chunks = [checkpoint(_head_scores, head, *part, entropy_gradient, use_reentrant=False) for part in parts]
    return TokenScores(torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks]))


def _head_scores(
    head: nn.Module, states: Tensor, targets: Tensor, temperatures: Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(states).float() / temperatures.unsqueeze(-1)
    all_logprobs = logits.log_softmax(dim=-1)
    chosen = all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    return chosen, entropies
