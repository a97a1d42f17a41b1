"""What the trainer reports: the figures of a step, and the result of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nouscoder.learner.batch_statistics import BatchStatistics, ScoredRollout
from nouscoder.learner.token_traces import TokenTrace


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
