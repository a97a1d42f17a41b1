"""What the trainer reports: the figures of a step, and the result of a batch.

For the viewer of rollouts it also reports what a step does with each token of a few rollouts: ratios and clips. A ratio
is that of the step which trains on the rollout, before the step changes the weights. In the first of the k steps of a
batch it is 1, because the policy is still pi_old.

These rollouts are written to files: tokens/00000012.json has the tokens of a few rollouts of batch 12.

INVARIANT: a file appears complete, and its contents depend only on the training of its batch. At most `_NEWEST` +
`_OLDER` files are kept: the newest ones, and older ones at even distances over the run. A rollout has at most
`_MAX_TOKENS` tokens in its file, the first and the last ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

import torch

from nouscoder.atomic_files import numbered, remove, write_whole
from nouscoder.domain.batch import Batch, CompletedGroups, GradedRollout
from nouscoder.domain.guards import ends_in_repetition, looks_hard_coded, repeated_share
from nouscoder.domain.rollout import Rollout
from nouscoder.domain.signal import has_signal
from nouscoder.domain.staleness import staleness_of
from nouscoder.domain.verdict import VerdictKind, group_length_rewards
from nouscoder.learner.parallel.ranks import Ranks
from nouscoder.objectives.advantage import AdvantageSection, Estimator, Overlong, batch_advantages, group_advantages
from nouscoder.objectives.base import Diagnostic, LossInputs, bounded_ratio
from nouscoder.objectives.clip import clipped_tokens
from nouscoder.policy_folder.tokenizer import PolicyTokenizer

# What a step does with each token of a few rollouts: ratios and clips, for the viewer of rollouts.


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


# Files for the viewer of rollouts.

_NEWEST, _OLDER = 16, 16
_MAX_TOKENS = 4096
_MAX_PROMPT = 4000  # characters


class TokenRecords:
    """The folder tokens/ of a run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "tokens"

    def write(self, trained: TrainedBatch, policy_version: int, tokenizer: PolicyTokenizer) -> None:
        """Write the file of a batch, and remove files that are too many. Raises StorageError."""
        rollouts = [
            _record(scored, trace, tokenizer)
            for scored in trained.scored
            if (trace := trained.traces.get(scored.graded.rollout.rollout_id)) is not None
        ]
        if not rollouts:
            return
        record = {"batch_id": trained.batch_id, "policy_version": policy_version, "rollouts": rollouts}
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        write_whole(self._folder / f"{trained.batch_id:08d}.json", text.encode("utf8", "backslashreplace"))
        there = numbered(self._folder, ".json")
        for number in there.keys() - kept(list(there)):
            remove(there[number])


def kept(numbers: Sequence[int]) -> set[int]:
    """Of ascending batch numbers, those whose files are kept."""
    older, newest = numbers[:-_NEWEST], numbers[-_NEWEST:]
    distance = 1
    while older and older[-1] // distance >= _OLDER:
        distance *= 2
    return {*newest, *(number for number in older if number % distance == 0)}


def _record(scored: ScoredRollout, trace: TokenTrace, tokenizer: PolicyTokenizer) -> dict[str, Any]:
    rollout = scored.graded.rollout
    shown = _shown(rollout.num_sampled_tokens)
    ids, versions = rollout.sampled_token_ids, _versions(rollout)
    return {
        "rollout_id": rollout.rollout_id,
        "problem_id": rollout.problem_id,
        "step": trace.step,
        "verdict": scored.graded.verdict.kind.value,
        "reward": scored.graded.reward,
        "advantage": scored.advantage,
        "staleness": scored.staleness,
        "length": rollout.num_sampled_tokens,
        "overlong": rollout.is_overlong,
        "prompt": tokenizer.decode(rollout.prompt_token_ids)[-_MAX_PROMPT:],
        "left_out": rollout.num_sampled_tokens - len(shown),
        "tokens": tokenizer.pieces([ids[at] for at in shown]),
        "versions": [versions[at] for at in shown],
        "ratios": [round(trace.ratios[at], 4) for at in shown],
        "mismatches": [round(trace.mismatches[at], 4) for at in shown],
        "clipped": [int(trace.clipped[at]) for at in shown],
    }


def _shown(length: int) -> list[int]:
    """The positions of the tokens that are written."""
    half = _MAX_TOKENS // 2
    return [*range(length)] if length <= _MAX_TOKENS else [*range(half), *range(length - half, length)]


def _versions(rollout: Rollout) -> list[int]:
    return [*chain.from_iterable([span.policy_version] * span.num_tokens for span in rollout.versions)]


# Figures of a batch that need no model (advantages, staleness, lengths), and its division into minibatches.


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


# The figures of a step, and the result of a batch.


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
