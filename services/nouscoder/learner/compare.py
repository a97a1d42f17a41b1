"""Compares all published objectives on one recorded batch: losses, gradients and clipped tokens.

All objectives see the same log-probabilities, advantages and correction. The gradients are those of one minibatch that
holds the whole batch; on the CPU they take one float32 vector of the model's size for each objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nouscoder.config import LearnerSection
from nouscoder.domain.batch import Batch
from nouscoder.learner.batch_statistics import ScoredRollout, score
from nouscoder.learner.logprobs import score_tokens
from nouscoder.learner.objectives.base import LossInputs, MinibatchCounts, Objective, ObjectiveTerms
from nouscoder.learner.objectives.clip import clipped_tokens
from nouscoder.learner.objectives.composition import SharedTerms
from nouscoder.learner.objectives.registry import OBJECTIVES, PUBLISHED
from nouscoder.learner.packing import MicroBatch, pack


@dataclass(frozen=True, slots=True)
class Clipped:
    """Share of loss tokens on which the clip acts. None where there are no such tokens.

    `by_length` has one share for each quarter of the batch's rollouts, the shortest first.
    """

    overall: float
    accepted: float | None
    rejected: float | None
    by_length: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One objective on the batch. `cosines` are those of its gradient with the gradient of each objective, by name.

    A cosine is None when one of the gradients is zero.
    """

    name: str
    loss: float
    gradient_norm: float
    clipped: Clipped
    cosines: Mapping[str, float | None]


class _Tally:
    """Sums over micro-batches for one objective."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.loss = 0.0
        self.gradient: Tensor | None = None
        self.is_clipped: list[Tensor] = []

    def add(self, inputs: LossInputs, terms: ObjectiveTerms, gradients: Sequence[Tensor]) -> None:
        self.loss += float(terms.loss.detach())
        flat = torch.cat([gradient.flatten().float().cpu() for gradient in gradients])
        self.gradient = flat if self.gradient is None else self.gradient + flat
        self.is_clipped.append(clipped_tokens(inputs, terms.diagnostics).cpu())


def compare(
    policy: PreTrainedModel, old_policy: PreTrainedModel, batch: Batch, settings: LearnerSection
) -> list[Comparison]:
    """Every objective of PUBLISHED on the batch, with pi_theta = `policy` and pi_old = `old_policy`.

    `settings` give the correction, the advantages and the size of micro-batches; KL and entropy terms are left out.
    Raises ValueError for a batch that cannot be trained on, or whose rollouts are all masked.
    """
    scored = [item for group in score(batch, settings.advantage) for item in group if not item.masked]
    if not scored:
        raise ValueError(f"all rollouts of batch {batch.batch_id} are masked")
    parts = pack([item.graded.rollout for item in scored], settings.microbatch_tokens, policy.device)
    shared = SharedTerms(correction=settings.correction)
    tallies = {name: _Tally(OBJECTIVES[type(section)](section, shared)) for name, section in PUBLISHED.items()}
    counts = MinibatchCounts(
        sum(part.num_tokens for part in parts),
        len(scored),
        sum(item.graded.rollout.num_sampled_tokens for item in scored if item.accepted),
    )
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    for part in parts:
        inputs = _inputs(policy, old_policy, part, scored)
        for tally in tallies.values():
            terms = tally.objective(inputs, counts)
            gradients = torch.autograd.grad(
                terms.loss, parameters, retain_graph=True, materialize_grads=True, allow_unused=True
            )
            tally.add(inputs, terms, gradients)
    groups = _Groups.of(parts, scored)
    return [_comparison(name, tallies, groups) for name in tallies]


def _inputs(
    policy: PreTrainedModel, old_policy: PreTrainedModel, part: MicroBatch, scored: Sequence[ScoredRollout]
) -> LossInputs:
    with torch.no_grad():
        old_logprobs = score_tokens(old_policy, part).logprobs
    scores = score_tokens(policy, part)
    rollouts = [scored[index] for index in part.rollout_indices]
    device, owners = part.input_ids.device, part.rollout_of_token
    return LossInputs(
        logprobs=scores.logprobs,
        old_logprobs=old_logprobs,
        sampler_logprobs=part.sampler_logprobs,
        advantages=torch.tensor([item.advantage for item in rollouts], dtype=torch.float32, device=device)[owners],
        rollout_of_token=owners,
        entropies=scores.entropies,
        accepted=torch.tensor([item.accepted for item in rollouts], device=device)[owners],
    )


@dataclass(frozen=True, slots=True)
class _Groups:
    """accepted [tokens], and quarter [tokens]: the quarter of the rollouts, by length, that each token is in."""

    accepted: Tensor
    quarter: Tensor

    @classmethod
    def of(cls, parts: Sequence[MicroBatch], scored: Sequence[ScoredRollout]) -> _Groups:
        order = sorted(range(len(scored)), key=lambda index: scored[index].graded.rollout.num_sampled_tokens)
        quarter_of = {index: 4 * place // len(order) for place, index in enumerate(order)}
        rollouts = [part.rollout_indices[row] for part in parts for row in part.rollout_of_token.tolist()]
        return cls(
            torch.tensor([scored[index].accepted for index in rollouts]),
            torch.tensor([quarter_of[index] for index in rollouts]),
        )


def _comparison(name: str, tallies: Mapping[str, _Tally], groups: _Groups) -> Comparison:
    tally = tallies[name]
    is_clipped = torch.cat(tally.is_clipped)
    clipped = Clipped(
        overall=float(is_clipped.float().mean()),
        accepted=_share(is_clipped, groups.accepted),
        rejected=_share(is_clipped, ~groups.accepted),
        by_length=tuple(_share(is_clipped, groups.quarter == quarter) for quarter in range(4)),
    )
    cosines = {other: _cosine(_gradient(tally), _gradient(tallies[other])) for other in tallies}
    return Comparison(name, tally.loss, float(_gradient(tally).norm()), clipped, cosines)


def _gradient(tally: _Tally) -> Tensor:
    assert tally.gradient is not None
    return tally.gradient.double()


def _share(is_clipped: Tensor, chosen: Tensor) -> float | None:
    return float(is_clipped[chosen].float().mean()) if bool(chosen.any()) else None


def _cosine(one: Tensor, other: Tensor) -> float | None:
    size = float(one.norm() * other.norm())
    return max(-1.0, min(1.0, float(one @ other) / size)) if size and math.isfinite(size) else None
