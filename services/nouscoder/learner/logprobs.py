"""Log-probabilities and entropies of loss tokens under a causal language model of transformers.

Only hidden states that predict a loss token go through the head, at most `_MAX_LOGITS` logits at once, or
`_MAX_COMPILED_LOGITS` where the head is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nouscoder.learner.context_parallel import RowGroup, part_of
from nouscoder.learner.fused_head import fused_scores
from nouscoder.learner.packing import MicroBatch

_MAX_LOGITS = 2**26  # 256 MiB of float32
_MAX_COMPILED_LOGITS = 2**28  # 512 MiB of bfloat16: what is compiled has no logits in float32


class Scorer(nn.Module):
    """`score_tokens` as a module: the root through which all forward passes of a sharded model go.

    With a `row`, its ranks hold each micro-batch together, and all get the scores of the whole.
    """

    def __init__(self, model: PreTrainedModel, row: RowGroup | None = None, *, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self._row = row
        self._score = partial(score_tokens, compiled=compiled)

    def forward(self, micro_batch: MicroBatch, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies): FSDP looks for gradients in tuples, and not in TokenScores."""
        if self._row is None:
            scores = self._score(self.model, micro_batch, entropy_gradient=entropy_gradient)
            return scores.logprobs, scores.entropies
        part = part_of(micro_batch, self._row)
        scores = self._score(self.model, part.micro_batch, entropy_gradient=entropy_gradient)
        mine = torch.stack([scores.logprobs, scores.entropies])
        logprobs, entropies = self._row.gather_scores(mine, part.owners).unbind()
        return logprobs, entropies if entropy_gradient else entropies.detach()


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of the loss tokens of a micro-batch: logprobs [tokens] with gradient, entropies [tokens] in nats."""

    logprobs: Tensor
    entropies: Tensor


def score_tokens(
    model: PreTrainedModel, micro_batch: MicroBatch, *, entropy_gradient: bool = False, compiled: bool = False
) -> TokenScores:
    """Scores under softmax(logits / temperature of the rollout), from which the tokens were sampled (at top-p 1).

    The entropies have a gradient only if `entropy_gradient`. `compiled`: the head is compiled too.
    Raises ValueError for a head that is not linear.
    """
    # An attention that ignores the layout finds the sequences by their positions, which start again from 0.
    experts = {} if micro_batch.experts is None else {"experts": micro_batch.experts.on(micro_batch.input_ids.device)}
    hidden = model.base_model(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        layout=micro_batch.layout,
        use_cache=False,
        **experts,
    ).last_hidden_state
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear):
        raise ValueError(f"the policy's head is a {type(head).__name__}, and only a linear head is supported")
    logprobs, entropies = fused_scores(
        hidden[0].index_select(0, micro_batch.positions),
        head.weight,
        head.bias,
        micro_batch.targets,
        micro_batch.temperatures,
        chunk_tokens=max(1, (_MAX_COMPILED_LOGITS if compiled else _MAX_LOGITS) // head.out_features),
        entropy_gradient=entropy_gradient,
        compiled=compiled,
    )
    return TokenScores(logprobs, entropies)
