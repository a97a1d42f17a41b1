"""Figures of a batch that need no model (advantages, staleness, lengths), and its division into minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from nouscoder.domain.advantage import group_advantages
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.staleness import staleness_of
from nouscoder.domain.verdict import VerdictKind


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A graded rollout with its advantage. `staleness` is in policy versions."""

    graded: GradedRollout
    advantage: float
    staleness: int

    @property
    def accepted(self) -> bool:
        """Whether every test passed."""
        return self.graded.verdict.kind is VerdictKind.ACCEPTED


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Figures of a whole batch. Lengths are mean tokens per rollout, None when the batch has no such rollout."""

    reward_mean: float
    pass_rate: float
    staleness_mean: float
    staleness_max: int
    overlong_share: float
    response_length_correct: float | None
    response_length_incorrect: float | None


def score(batch: Batch) -> list[list[ScoredRollout]]:
    """The groups of the batch, with staleness and with advantages computed from the rewards in the batch.

    Raises ValueError for a reward that is not finite, an empty batch, or a rollout that is newer than the policy.
    """
    if not batch.rollouts:
        raise ValueError(f"batch {batch.batch_id} is empty")
    return [_score_group(group, batch.policy_version) for group in batch.groups().values()]


def _score_group(group: Sequence[GradedRollout], policy_version: int) -> list[ScoredRollout]:
    advantages = group_advantages([graded.reward for graded in group], [graded.rollout.is_overlong for graded in group])
    return [
        ScoredRollout(graded, advantage, staleness_of(graded.rollout, policy_version))
        for graded, advantage in zip(group, advantages, strict=True)
    ]


def minibatches(
    groups: Sequence[list[ScoredRollout]], num_minibatches: int, seed: int, batch_id: int
) -> list[list[ScoredRollout]]:
    """Distribute whole groups over disjoint minibatches, in an order that depends only on the seed and the batch.

    Sizes differ by at most one group. Raises ValueError when there are fewer groups than minibatches.
    """
    if len(groups) < num_minibatches:
        raise ValueError(f"batch {batch_id} has {len(groups)} groups, too few for {num_minibatches} steps")
    order = list(groups)
    Random(f"{seed}/minibatches/{batch_id}").shuffle(order)
    return [[scored for group in order[index::num_minibatches] for scored in group] for index in range(num_minibatches)]


def statistics_of(scored: Sequence[ScoredRollout]) -> BatchStatistics:
    """The figures of all rollouts. There must be at least one."""
    correct = [item.graded.rollout.num_sampled_tokens for item in scored if item.accepted]
    incorrect = [item.graded.rollout.num_sampled_tokens for item in scored if not item.accepted]
    return BatchStatistics(
        reward_mean=sum(item.graded.reward for item in scored) / len(scored),
        pass_rate=len(correct) / len(scored),
        staleness_mean=sum(item.staleness for item in scored) / len(scored),
        staleness_max=max(item.staleness for item in scored),
        overlong_share=sum(item.graded.rollout.is_overlong for item in scored) / len(scored),
        response_length_correct=sum(correct) / len(correct) if correct else None,
        response_length_incorrect=sum(incorrect) / len(incorrect) if incorrect else None,
    )
