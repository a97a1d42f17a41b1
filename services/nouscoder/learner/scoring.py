"""From the rewards of a batch to minibatches: advantages, staleness, masks, and the figures that need no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from random import Random

from nouscoder.domain.batch import Batch, CompletedGroups, GradedRollout
from nouscoder.domain.guards import ends_in_repetition, looks_hard_coded, repeated_share
from nouscoder.domain.reward import group_length_rewards
from nouscoder.domain.signal import has_signal
from nouscoder.domain.staleness import staleness_of
from nouscoder.domain.verdict import VerdictKind
from nouscoder.objectives.advantage import AdvantageSection, Estimator, Overlong, batch_advantages, group_advantages


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A graded rollout with its advantage. `staleness` is in policy versions. A `masked` one is not in the loss."""

    graded: GradedRollout
    advantage: float
    staleness: int
    masked: bool = False

    @property
    def accepted(self) -> bool:
        """Whether every test passed."""
        return self.graded.verdict.kind is VerdictKind.ACCEPTED


@dataclass(frozen=True, slots=True)
class AllGroups:
    """Figures of all groups that became complete while the batch gathered: those of equal rewards count too.

    `pass_at_g` is the share of groups with an accepted rollout, so pass@G for groups of G rollouts.
    """

    groups: int
    reward_mean: float
    pass_rate: float
    pass_at_g: float


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Figures of a whole batch. Lengths are mean tokens per rollout, None when the batch has no such rollout.

    `repetition_share` is the share of rollouts that end in a repetition, `hard_coding_share` that of the accepted
    programs that look hard-coded (domain/guards.py), None without an accepted one. `same_programs` is the mean over
    groups of the share of programs that repeat another one of the group, None without a group of two.
    `model_reward_correlation` is that of a reward model's scores with the verified rewards, None without such a model
    or when one of the two is the same for all. `pass_at_g` is the share of the batch's groups with an accepted rollout.
    `all_groups` is None when no broker counted them.
    """

    reward_mean: float
    pass_rate: float
    staleness_mean: float
    staleness_max: int
    overlong_share: float
    response_length_correct: float | None
    response_length_incorrect: float | None
    response_length: float
    repetition_share: float
    hard_coding_share: float | None
    same_programs: float | None
    pass_at_g: float
    all_groups: AllGroups | None
    model_reward_correlation: float | None = None


def score(
    batch: Batch, settings: AdvantageSection, terms: Mapping[str, float] | None = None
) -> list[list[ScoredRollout]]:
    """The groups of the batch, with staleness and with advantages computed from the rewards in the batch.

    `terms` are added to the rewards that advantages are made of, by rollout; the rollouts keep their verified rewards.
    Raises ValueError for a reward that is not finite, an empty batch, or a rollout that is newer than the policy.
    """
    if not batch.rollouts:
        raise ValueError(f"batch {batch.batch_id} is empty")
    groups = [*batch.groups().values()]
    scored = [
        [_scored(graded, advantage, batch.policy_version, settings) for graded, advantage in zip(*pair, strict=True)]
        for pair in zip(groups, _advantages(groups, settings, terms or {}), strict=True)
    ]
    if not settings.mask_equal_rewards:
        return scored
    return [
        [replace(item, masked=item.masked or not has_signal([one.graded.reward for one in group])) for item in group]
        for group in scored
    ]


def _advantages(
    groups: Sequence[Sequence[GradedRollout]], settings: AdvantageSection, terms: Mapping[str, float]
) -> list[list[float]]:
    """The advantages [groups][rollouts]."""
    rewards = [_shaped_rewards(group, settings.length_weight, terms) for group in groups]
    zeroed = [
        [graded.rollout.is_overlong and settings.overlong is not Overlong.KEPT for graded in group] for group in groups
    ]
    if not settings.estimator.is_of_batch:
        return [
            group_advantages(of_group, cut, settings.estimator, settings.ddof, settings.epsilon)
            for of_group, cut in zip(rewards, zeroed, strict=True)
        ]
    by_tokens = settings.estimator is Estimator.BATCH_TOKEN_WHITENED
    weights = [graded.rollout.num_sampled_tokens if by_tokens else 1 for group in groups for graded in group]
    of_batch = iter(batch_advantages([*chain(*rewards)], [*chain(*zeroed)], weights, settings.ddof, settings.epsilon))
    return [[*islice(of_batch, len(group))] for group in groups]


def _shaped_rewards(group: Sequence[GradedRollout], length_weight: float, terms: Mapping[str, float]) -> list[float]:
    rewards = [graded.reward + terms.get(graded.rollout.rollout_id, 0.0) for graded in group]
    if not length_weight:
        return rewards
    lengths = [graded.rollout.num_sampled_tokens for graded in group]
    of_length = group_length_rewards(lengths, [graded.verdict.kind is VerdictKind.ACCEPTED for graded in group])
    return [reward + length_weight * term for reward, term in zip(rewards, of_length, strict=True)]


def _scored(graded: GradedRollout, advantage: float, policy_version: int, settings: AdvantageSection) -> ScoredRollout:
    masked = graded.rollout.is_overlong and settings.overlong is Overlong.MASKED
    return ScoredRollout(graded, advantage, staleness_of(graded.rollout, policy_version), masked)


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


def inspected(scored: Sequence[ScoredRollout], batch_id: int, count: int, seed: int) -> list[ScoredRollout]:
    """`count` rollouts of a batch for people to look at. They depend only on the seed and the batch."""
    return Random(f"{seed}/samples/{batch_id}").sample(scored, min(count, len(scored)))


def statistics_of(scored: Sequence[ScoredRollout], completed: CompletedGroups | None = None) -> BatchStatistics:
    """The figures of all rollouts. There must be at least one. `completed` is what the broker counted."""
    rollouts = [item.graded.rollout for item in scored]
    correct = [item.graded.rollout.num_sampled_tokens for item in scored if item.accepted]
    incorrect = [item.graded.rollout.num_sampled_tokens for item in scored if not item.accepted]
    programs = [item.graded.rollout.text for item in scored if item.accepted]
    groups: dict[str, list[ScoredRollout]] = {}
    for item in scored:
        groups.setdefault(item.graded.rollout.group_id, []).append(item)
    repeated = [repeated_share([item.graded.rollout.text for item in group]) for group in groups.values()]
    return BatchStatistics(
        reward_mean=sum(item.graded.reward for item in scored) / len(scored),
        pass_rate=len(correct) / len(scored),
        staleness_mean=sum(item.staleness for item in scored) / len(scored),
        staleness_max=max(item.staleness for item in scored),
        overlong_share=sum(item.graded.rollout.is_overlong for item in scored) / len(scored),
        response_length_correct=_mean(correct),
        response_length_incorrect=_mean(incorrect),
        response_length=sum(rollout.num_sampled_tokens for rollout in rollouts) / len(rollouts),
        repetition_share=sum(ends_in_repetition(rollout.sampled_token_ids) for rollout in rollouts) / len(rollouts),
        hard_coding_share=_mean([*map(looks_hard_coded, programs)]),
        same_programs=_mean([share for share in repeated if share is not None]),
        pass_at_g=sum(any(item.accepted for item in group) for group in groups.values()) / len(groups),
        all_groups=_all_groups(completed),
    )


def _all_groups(completed: CompletedGroups | None) -> AllGroups | None:
    if completed is None or not completed.rollouts:
        return None
    return AllGroups(
        groups=completed.groups,
        reward_mean=completed.reward_sum / completed.rollouts,
        pass_rate=completed.accepted / completed.rollouts,
        pass_at_g=completed.solved / completed.groups,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
