"""Which models the learner trains: those whose log-probabilities it computes as the model itself does.

Models of transformers differ in what they do with packed rows and with their logits. An attention or a state-space
layer may run on from one sequence of a row into the next. Logits may be changed after the head. None of that raises an
error: the loss is just wrong. So each model is measured when it is loaded, on a few short sequences of random tokens,
with its own weights, on its device and in the type of its passes:

    1. the model's own forward pass of each sequence alone, with transformers' attention and head, against
    2. the learner's scorer on all sequences packed in one row. Where they agree, rows are packed.
    3. Else, the learner's scorer on each sequence in a row of its own. Where that agrees, each row has one sequence.
    4. Else the model is refused.

The own pass sees one token more than the scorer does, so a model that looks ahead is refused too. Windows, chunks and
the like are shorter during the measurement than the sequences (`_SPANS`), so an attention that loses them is seen.

Two passes agree when nine of ten log-probabilities differ by at most a share of the standard deviation of the own ones:
0.001 in float32 and 0.25 in 16 bits, or 0.0001 and 0.02 nats where that is more. One of ten may differ by more, because
a router whose two best experts are equal may choose the other one. Measured shares:

    float32   types that are exact: at most 2e-6; types that leak: 0.4 to 2
    bfloat16  SmolLM2-135M against float32, which is more than two kernels differ by: 0.07; when it leaks: 1.4

INVARIANT: no model of a run, a fine-tuning, a teacher or a reward model is used before it has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nouscoder.errors import Unusable
from nouscoder.learner.model.logprobs import Scorer
from nouscoder.learner.model.packed_attention import RowLayout, attend_alone, packs
from nouscoder.learner.model.packing import MicroBatch
from nouscoder.learner.parallel.ranks import Ranks

log = logging.getLogger(__name__)

# (share, nats), for the type of the passes.
_EXACT, _ROUNDED = (1e-3, 1e-4), (0.25, 0.02)
_AGREEING = 0.9  # of the tokens
_LENGTHS = (6, 10, 7)
# Names under which configurations and layers hold how far an attention reaches.
_SPANS = ("sliding_window", "attention_chunk_size", "index_topk", "keep_window_size")
_SHORT_SPAN = 4
# What a model raises that does not know an argument of packed rows.
_UNKNOWN_ARGUMENT = (TypeError, ValueError, AttributeError, KeyError, IndexError)


@torch.no_grad()
def admit(scorer: Scorer, dtype: torch.dtype, ranks: Ranks | None = None) -> None:
    """Choose packed rows for the model, or rows of one sequence. All ranks call it together. Raises Unusable."""
    sequences = probes(scorer.model, _LENGTHS)

    def scores(rows: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.cat([scorer(row_of(row), entropy_gradient=False)[0] for row in rows])

    with short_spans(scorer.model):
        own = _own_logprobs(scorer, sequences, dtype, ranks)
        alone = [[ids] for ids in sequences]
        choose_rows(scorer.model, own, lambda: scores([sequences]), lambda: scores(alone), dtype, ranks)


def _own_logprobs(scorer: Scorer, sequences: Sequence[Tensor], dtype: torch.dtype, ranks: Ranks | None) -> Tensor:
    """Those of the model itself. Raises Unusable."""
    try:
        own = torch.cat([scorer.own_logprobs(ids) for ids in sequences])
    except (RuntimeError, *_UNKNOWN_ARGUMENT) as error:
        if ranks is not None and ranks.size > 1:  # it may be the loss of another rank
            raise
        raise Unusable(
            f"a model of type {scorer.model.config.model_type} cannot be trained: transformers' own forward pass fails"
            f" in {str(dtype).removeprefix('torch.')} ({_first_line(error)}): "
            + ('set learner.dtype = "float32", or ' if dtype != torch.float32 else "")
            + "choose a model of another type (docs/models.md)"
        ) from error
    if not bool(own.isfinite().all()):
        raise Unusable(
            f"a model of type {scorer.model.config.model_type} cannot be trained: its own log-probabilities are not"
            " finite: its weights are damaged"
        )
    return own


def choose_rows(
    model: PreTrainedModel,
    own: Tensor,
    packed: Callable[[], Tensor],
    alone: Callable[[], Tensor],
    dtype: torch.dtype,
    ranks: Ranks | None = None,
) -> None:
    """Choose packed rows if `packed` agrees with `own`, else rows of one sequence if `alone` does.

    `own` is what the model itself gives. All ranks must call it together. Raises Unusable when neither agrees.
    """
    everyone = ranks or Ranks()
    if packs(model):
        if not any(everyone.gather(bool(_fault(own, packed, dtype)))):
            return
        attend_alone(model)
    fault = _fault(own, alone, dtype)
    if not any(everyone.gather(bool(fault))):
        log.info("each row has one sequence", extra={"model_type": model.config.model_type})
        return
    shared = everyone.row is not None
    raise Unusable(
        f"a model of type {model.config.model_type} cannot be trained{' with learner.context_parallel' * shared}:"
        f" {fault or 'another rank found a fault'}: "
        + ("set learner.context_parallel = 1, or " * shared)
        + "choose a model of another type (docs/models.md)"
    )


@contextmanager
def short_spans(model: PreTrainedModel) -> Iterator[None]:
    """Inside, attention reaches only so far that short sequences show it."""
    holders = {id(one): one for one in (model.config, model.config.get_text_config(), *model.modules())}.values()
    found = [(one, name, span) for one in holders for name in _SPANS if isinstance(span := vars(one).get(name), int)]
    long = [(one, name, span) for one, name, span in found if span > _SHORT_SPAN]
    try:
        for one, name, _ in long:
            setattr(one, name, _SHORT_SPAN)
        yield
    finally:
        for one, name, span in long:
            setattr(one, name, span)


def probes(model: PreTrainedModel, lengths: Sequence[int]) -> list[Tensor]:
    """Sequences [tokens] of random ids from the middle of the vocabulary, where no special tokens are. Always the same.

    They end in different tokens.
    """
    embedding: Any = model.get_input_embeddings()
    size = int(embedding.weight.shape[0])
    chance = torch.Generator().manual_seed(0)
    return [torch.randint(size // 4, max(size // 2, 1), (n,), generator=chance).to(model.device) for n in lengths]


def row_of(sequences: Sequence[Tensor]) -> MicroBatch:
    """A row of these sequences [tokens], in which each token but the first of each is a loss token."""
    device, lengths = sequences[0].device, [len(ids) - 1 for ids in sequences]
    targets = torch.cat([ids[1:] for ids in sequences])
    ones = torch.ones(len(targets), device=device)
    return MicroBatch(
        rollout_indices=tuple(range(len(sequences))),
        input_ids=torch.cat([ids[:-1] for ids in sequences]).unsqueeze(0),
        position_ids=torch.cat([torch.arange(length, device=device) for length in lengths]).unsqueeze(0),
        layout=RowLayout.of(lengths, device),
        rollout_of_token=torch.cat([torch.full((n,), index, device=device) for index, n in enumerate(lengths)]),
        positions=torch.arange(len(targets), device=device),
        targets=targets,
        sampler_logprobs=-ones,
        temperatures=ones,
    )


def _fault(own: Tensor, compute: Callable[[], Tensor], dtype: torch.dtype) -> str:
    """Why what is computed is not `own`; empty when they agree."""
    try:
        found = compute()
    except _UNKNOWN_ARGUMENT as error:
        return f"the learner cannot compute it ({_first_line(error)})"
    share, least = _EXACT if dtype == torch.float32 else _ROUNDED
    bound = max(share * float(own.std()), least)
    difference = float((found - own).abs().float().quantile(_AGREEING))
    if difference <= bound:
        return ""
    return (
        f"what the learner computes differs from the model's own numbers by {difference:.3g},"
        f" and {bound:.1g} is the most"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
