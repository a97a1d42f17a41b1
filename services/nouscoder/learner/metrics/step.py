"""What the trainer reports: the figures of a step, the result of a batch, and what a step does with single tokens.

A ratio of a token is that of the step which trains on the rollout, before the step changes the weights. In the first of
the k steps of a batch it is 1, because the policy is still pi_old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nouscoder.learner.parallel.ranks import Ranks
from nouscoder.learner.scoring import BatchStatistics, ScoredRollout
from nouscoder.objectives.base import Diagnostic, LossInputs, bounded_ratio
from nouscoder.objectives.clip import clipped_tokens


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """The sampled tokens of one rollout, in order.

    ratios [tokens]: pi_theta / pi_old. mismatches [tokens]: pi_old / pi_sampler. clipped [tokens]: whether the clip of
    the objective acts on the token. `step` counts from 1.
    """

    rollout_id: str
    step: int
    ratios: tuple[float, ...]
    mismatches: tuple[float, ...]
    clipped: tuple[bool, ...]


class TokenTraces:
    """Collects the traces of the `wanted` rollouts of a batch."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = wanted
        self._found: dict[str, TokenTrace] = {}

    @torch.no_grad()
    def add(
        self, step: int, rollouts: Sequence[ScoredRollout], inputs: LossInputs, diagnostics: Mapping[str, Diagnostic]
    ) -> None:
        """Add those of a micro-batch. `rollouts` are the rollouts of its row, in order."""
        for row, scored in enumerate(rollouts):
            rollout_id = scored.graded.rollout.rollout_id
            if rollout_id not in self._wanted:
                continue
            tokens = inputs.rollout_of_token == row
            ratios = bounded_ratio(inputs.logprobs[tokens], inputs.old_logprobs[tokens])
            mismatches = bounded_ratio(inputs.old_logprobs[tokens], inputs.sampler_logprobs[tokens])
            self._found[rollout_id] = TokenTrace(
                rollout_id,
                step,
                tuple(ratios.tolist()),
                tuple(mismatches.tolist()),
                tuple(clipped_tokens(inputs, diagnostics)[tokens].tolist()),
            )

    def over(self, ranks: Ranks) -> dict[str, TokenTrace]:
        """Those of all ranks, by rollout. All ranks must call it together."""
        return {name: trace for part in ranks.gather(self._found) for name, trace in part.items()}


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step. `step` counts from 1.

    num_tokens counts loss tokens; model_tokens counts all input tokens of the model without padding, and squared_tokens
    is the sum of the squares of those of each rollout. `diagnostics` are those of every objective and those of this
    one, by name. A step that is `skipped` changed nothing.
    """

    step: int
    skipped: bool
    loss: float
    gradient_norm: float
    learning_rate: float
    num_tokens: int
    model_tokens: int
    duration_s: float
    diagnostics: Mapping[str, float]
    squared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """The result of `train_batch`. `duration_s` includes the computation of the old log-probabilities.

    `scored` and `statistics` are of the batch itself, without the `num_replayed` rollouts of earlier batches. `traces`
    are those of a few of its rollouts, by rollout.
    """

    batch_id: int
    steps: tuple[StepMetrics, ...]
    scored: tuple[ScoredRollout, ...]
    statistics: BatchStatistics
    duration_s: float
    num_replayed: int = 0
    traces: Mapping[str, TokenTrace] = field(default_factory=dict)

    @property
    def model_tokens(self) -> int:
        """Input tokens of the model without padding."""
        return sum(step.model_tokens for step in self.steps)

    @property
    def squared_tokens(self) -> int:
        """The sum of the squares of those of each rollout."""
        return sum(step.squared_tokens for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Input tokens of the model without padding, per second of the whole duration."""
        return self.model_tokens / self.duration_s
