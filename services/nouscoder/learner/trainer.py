"""The optimizer loop over one batch: k steps over disjoint minibatches of whole groups (PPO-off-policy-k).

INVARIANT: the state after `train_batch` depends, bit for bit, only on the state before, the batches and the settings. A
replay of a batch from a checkpoint therefore gives the same losses as the first time. If a loss, log-probability or
gradient is not finite, TrainingError is raised before the weights of that step change.

A step is skipped, so that it changes neither weights nor optimizer, when its gradient's norm is above
learner.skip_gradient_norm or when all its rollouts are masked. It counts as a step, and it is logged and counted.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from nouscoder.config import Config, LearnerSection
from nouscoder.domain.batch import Batch
from nouscoder.domain.rollout import Rollout
from nouscoder.errors import NousCoderError
from nouscoder.learner.metrics.diagnostics import StepDiagnostics
from nouscoder.learner.metrics.step import StepMetrics, TokenTraces, TrainedBatch
from nouscoder.learner.model.computation import Computation
from nouscoder.learner.model.logprobs import Scorer, TokenScores
from nouscoder.learner.model.packed_attention import row_budget
from nouscoder.learner.model.packing import MicroBatch, input_lengths, pack_row
from nouscoder.learner.model.reward_scores import ModelRewards
from nouscoder.learner.optimizer import optimizer_of
from nouscoder.learner.parallel.balance import Cost, rounds
from nouscoder.learner.parallel.ranks import Ranks, whole
from nouscoder.learner.scoring import ScoredRollout, inspected, minibatches, score, statistics_of
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.objectives.base import LossInputs, MinibatchCounts, Objective
from nouscoder.objectives.loss import SharedTerms
from nouscoder.objectives.registry import objective_of


class TrainingError(NousCoderError):
    """Training cannot continue. The message names the step and the value that is not finite."""


class TrainingInterrupted(Exception):
    """The process is stopping. The batch is incomplete and must be trained again from the state before it."""


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """A minibatch. `scored` are the rollouts in the loss. old_scores and reference_logprobs have one item a part.

    Those of old_scores are None while the policy is still the old one; those of reference_logprobs are None when the
    objective does not need them.
    """

    scored: Sequence[ScoredRollout]
    parts: list[MicroBatch]
    old_scores: Sequence[TokenScores | None]
    reference_logprobs: Sequence[Tensor | None]


def loss_inputs(
    part: MicroBatch, rollouts: Sequence[ScoredRollout], scores: TokenScores, old_logprobs: Tensor
) -> LossInputs:
    """What an objective gets of a micro-batch with these rollouts."""

    def of_tokens(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=part.input_ids.device)[part.rollout_of_token]

    return LossInputs(
        logprobs=scores.logprobs,
        old_logprobs=old_logprobs,
        sampler_logprobs=part.sampler_logprobs,
        advantages=of_tokens([item.advantage for item in rollouts], torch.float32),
        rollout_of_token=part.rollout_of_token,
        entropies=scores.entropies,
        accepted=of_tokens([item.accepted for item in rollouts], torch.bool),
        num_versions=of_tokens([item.graded.rollout.num_versions for item in rollouts], torch.int64),
        is_fresh=of_tokens([item.staleness == 0 for item in rollouts], torch.bool),
    )


def counts_of(scored: Sequence[ScoredRollout]) -> MinibatchCounts:
    """The numbers that normalise the loss of a minibatch of these rollouts."""
    tokens = [item.graded.rollout.num_sampled_tokens for item in scored]
    accepted = sum(size for size, item in zip(tokens, scored, strict=True) if item.accepted)
    return MinibatchCounts(sum(tokens), len(scored), accepted)


class Trainer:
    """Owns the model and its optimizer. All calls except `interrupt` must come from one thread.

    `load_reference` loads the policy for reference log-probabilities, the initial one or the teacher of these settings,
    when an objective first needs it. `objective` defaults to that of the configuration. Raises ValueError when the
    objective needs a reference that is missing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config,
        load_reference: Callable[[LearnerSection], PreTrainedModel] | None = None,
        objective: Objective | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        settings = config.learner
        self.ranks = ranks or Ranks()
        self.model = model
        self._replays_experts = config.policy.router_replay
        self._computation = Computation(model, config, self.ranks)
        self._cost = Cost.of(model)
        self._load_reference = load_reference
        self._reference: Scorer | None = None
        self._teacher = ""
        self._model_rewards = ModelRewards(RunFiles.of(config).policy, self._computation.device)
        self._given_objective = objective
        self.optimizer = optimizer_of(settings, self.model)
        self.step = 0
        self.entropy_coefficient = settings.entropy.coefficient
        self._seed = config.run.seed
        self._interrupted = threading.Event()
        self._traces = TokenTraces(frozenset())
        self.use(settings)

    @property
    def computing(self) -> PreTrainedModel:
        """The model of the forward and backward passes: `model`, or its copy of another type or on another device."""
        return self._computation.model

    @property
    def has_reference(self) -> bool:
        """Whether a reference policy scores each batch."""
        return self._reference is not None

    def admit(self) -> None:
        """Measure whether it computes the model's own log-probabilities; all ranks together. Raises Unusable."""
        self._computation.admit()

    def use(self, settings: LearnerSection) -> None:
        """Train with these settings from now on. Raises ValueError without a reference policy, and Unusable."""
        self._settings = settings
        self._objective = self._given_objective or objective_of(
            settings.objective, SharedTerms(settings.correction, settings.reference_kl, settings.entropy)
        )
        self._model_rewards.use(settings)
        if not settings.entropy.target:
            self.entropy_coefficient = settings.entropy.coefficient
        for group in self.optimizer.param_groups:
            group.update(betas=settings.adam_betas, weight_decay=settings.weight_decay)
        has_it = self._reference is not None and self._teacher == settings.teacher
        if self._objective.needs.reference_logprobs and not has_it:
            if self._load_reference is None:
                raise ValueError("the objective needs a reference policy")
            self._reference = self._computation.reference(partial(self._load_reference, settings))
            self._teacher = settings.teacher

    def interrupt(self) -> None:
        """Make `train_batch` raise TrainingInterrupted before its next step. Callable from any thread."""
        self._interrupted.set()

    def train_batch(self, batch: Batch, replayed: Sequence[Batch] = ()) -> TrainedBatch:
        """Take `steps_per_batch` optimizer steps on the batch, mixed with the groups of earlier, `replayed` batches.

        Raises TrainingError, or ValueError for a bad batch.
        """
        started, settings = time.monotonic(), self._settings.advantage
        if self._replays_experts and all(graded.rollout.experts is None for graded in batch.rollouts):
            raise ValueError(
                f"no rollout of batch {batch.batch_id} has recorded experts: policy.router_replay needs them"
            )
        self._computation.refresh()  # a checkpoint may have been loaded since
        terms = self._model_rewards.terms(batch)
        groups = score(batch, settings, terms.by_rollout)
        everyone = tuple(chain(*groups))
        shown = inspected(everyone, batch.batch_id, self._settings.samples_per_batch, self._seed)
        self._traces = TokenTraces(frozenset(one.graded.rollout.rollout_id for one in shown))
        older = [replace(earlier, policy_version=batch.policy_version) for earlier in replayed]
        again = [score(earlier, settings, self._model_rewards.terms(earlier).by_rollout) for earlier in older]
        cut = minibatches([*groups, *chain(*again)], self._settings.steps_per_batch, self._seed, batch.batch_id)
        prepared = [self._pack(scored) for scored in cut]
        # Old log-probabilities are those before the first of the k steps, so they are computed before it. The first
        # step starts from the old policy and needs no separate pass, except for the entropy of the whole batch.
        first = 0 if self._objective.needs.batch_entropy else 1
        scorer = self._computation.scorer
        prepared[first:] = [replace(one, old_scores=self._scores(scorer, one.parts)) for one in prepared[first:]]
        steps = self._take_steps(prepared)
        traces = self._traces.over(self.ranks)
        duration_s, num_replayed = time.monotonic() - started, sum(len(earlier.rollouts) for earlier in replayed)
        statistics = replace(statistics_of(everyone, batch.completed), model_reward_correlation=terms.correlation)
        return TrainedBatch(batch.batch_id, steps, everyone, statistics, duration_s, num_replayed, traces)

    def mean_loss(self, rollouts: Sequence[Rollout]) -> float:
        """The mean -log p of their sampled tokens, in nats. All ranks must call it. Raises TrainingError."""
        self._computation.refresh()
        scores = self._scores(self._computation.scorer, self._rows(rollouts))
        mine = sum(float(part.logprobs.double().sum()) for part in scores) if self.ranks.counts_row else 0.0
        (total,) = self.ranks.sum([mine])
        return -total / sum(rollout.num_sampled_tokens for rollout in rollouts)

    def _take_steps(self, minibatches: Sequence[_Minibatch]) -> tuple[StepMetrics, ...]:
        """One step on each minibatch, with the entropy coefficient of the batch."""
        if not self._objective.needs.batch_entropy:
            return tuple(self._take_step(minibatch, self.entropy_coefficient) for minibatch in minibatches)
        settings, entropy = self._settings.entropy, self._mean_entropy(minibatches)
        active = settings.active(self.entropy_coefficient, entropy)
        steps = tuple(self._take_step(minibatch, active) for minibatch in minibatches)
        self.entropy_coefficient = settings.following(self.entropy_coefficient, entropy)
        return steps

    def _pack(self, scored: Sequence[ScoredRollout]) -> _Minibatch:
        scored = [item for item in scored if not item.masked]
        parts = self._rows([item.graded.rollout for item in scored])
        reference: Sequence[Tensor | None] = [None] * len(parts)
        if self._reference is not None and self._objective.needs.reference_logprobs:
            reference = [scores.logprobs for scores in self._scores(self._reference, parts)]
        return _Minibatch(scored, parts, [None] * len(parts), reference)

    def _rows(self, rollouts: Sequence[Rollout]) -> list[MicroBatch]:
        models = [self.computing, *([] if self._reference is None else [self._reference.model])]
        budget = min(row_budget(model, self._settings.microbatch_tokens) for model in models)
        rows = rounds(input_lengths(rollouts), budget, self.ranks.num_rows, self._cost)
        shares = all(map(self._computation.shares_prompts, models))
        settings = {"replays_experts": self._replays_experts, "shares_prompts": shares}
        return [pack_row(rollouts, row[self.ranks.row_number], self._computation.device, **settings) for row in rows]

    @torch.no_grad()
    def _scores(self, scorer: Scorer, parts: Sequence[MicroBatch]) -> list[TokenScores]:
        scores: list[TokenScores] = [scorer(part, entropy_gradient=False) for part in parts]
        if any(self.ranks.sum([sum(_num_odd(part.logprobs) for part in scores)])):
            raise _diverged(f"a log-probability of the policy at step {self.step} is not finite", _BROKEN)
        return scores

    def _take_step(self, minibatch: _Minibatch, entropy_coefficient: float) -> StepMetrics:
        if any(self.ranks.sum([self._interrupted.is_set()])):
            raise TrainingInterrupted
        started = time.monotonic()
        counts = counts_of(minibatch.scored)
        self.optimizer.zero_grad(set_to_none=True)
        diagnostics = StepDiagnostics()
        loss, num_odd = 0.0, 0
        columns = (minibatch.parts, minibatch.old_scores, minibatch.reference_logprobs)
        for part, old, reference in zip(*columns, strict=True):
            owners = [minibatch.scored[position] for position in part.rollout_indices]
            needs = self._objective.needs
            scores: TokenScores = self._computation.scorer(part, entropy_gradient=needs.entropy_gradient)
            inputs = loss_inputs(part, owners, scores, scores.logprobs.detach() if old is None else old.logprobs)
            inputs = replace(inputs, reference_logprobs=reference, entropy_coefficient=entropy_coefficient)
            loss += self._backward(inputs, counts, diagnostics, owners)
            num_odd += _num_odd(inputs.logprobs)
        loss = self._sum_of_ranks(loss, num_odd)
        norm = self._clip_gradient(loss) if minibatch.parts else 0.0
        limit = self._settings.skip_gradient_norm
        skipped = not minibatch.parts or (limit > 0 and norm > limit)
        rate = self._settings.learning_rate * self._settings.schedule.factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if not skipped:
            self.optimizer.step()
            self._computation.refresh()
        self.step += 1
        lengths = input_lengths([item.graded.rollout for item in minibatch.scored])
        return StepMetrics(
            step=self.step,
            skipped=skipped,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            num_tokens=counts.num_tokens,
            model_tokens=sum(lengths),
            squared_tokens=sum(length**2 for length in lengths),
            duration_s=time.monotonic() - started,
            diagnostics=diagnostics.over(self.ranks).result() if minibatch.parts else {},
        )

    def _backward(
        self,
        inputs: LossInputs,
        counts: MinibatchCounts,
        diagnostics: StepDiagnostics,
        rollouts: Sequence[ScoredRollout],
    ) -> float:
        """Add the gradient of a micro-batch. Returns its share of the loss, which one rank of its row counts."""
        if not inputs.logprobs.numel():  # other ranks have a row in this round, and they need this one's backward pass
            torch.autograd.backward(inputs.logprobs.sum())
            return 0.0
        terms = self._objective(inputs, counts)
        torch.autograd.backward(terms.loss)
        if not self.ranks.counts_row:
            return 0.0
        diagnostics.add(inputs, terms.diagnostics)
        self._traces.add(self.step + 1, rollouts, inputs, terms.diagnostics)
        return float(terms.loss.detach())

    def _sum_of_ranks(self, loss: float, num_odd: int) -> float:
        """The loss of all ranks. Raises TrainingError, on all of them, when a value on one is not finite."""
        loss, total_odd = self.ranks.sum([loss, num_odd])
        if not math.isfinite(loss):
            raise _diverged(f"the loss of step {self.step + 1} is {loss}")
        if total_odd:
            raise _diverged(f"a log-probability in step {self.step + 1} is not finite")
        return loss

    def _mean_entropy(self, minibatches: Sequence[_Minibatch]) -> float:
        """The mean entropy, in nats, of the loss tokens of the whole batch. 0 when there are none."""
        old = [scores.entropies.double() for part in minibatches for scores in part.old_scores if scores is not None]
        total, count = self.ranks.sum([float(torch.cat(old).sum()) if old else 0.0, sum(map(len, old))])
        return total / count if count else 0.0

    def _clip_gradient(self, loss: float) -> float:
        """Clip the norm of the gradient. Returns the norm before. Raises TrainingError when it is not finite."""
        norm = float(whole(clip_grad_norm_(self.model.parameters(), self._settings.max_gradient_norm)))
        if not math.isfinite(norm):
            raise _diverged(f"the gradient of step {self.step + 1} has norm {norm} (its loss is {loss})")
        return norm


_CURABLE = "resume with a lower learner.learning_rate; the weights before this step are kept"
_BROKEN = "begin again from an earlier version (nouscoder export RUN --version N) with a lower learner.learning_rate"


def _diverged(what: str, advice: str = _CURABLE) -> TrainingError:
    """The error of values that are not finite."""
    return TrainingError(f"{what}: the training has diverged; {advice}")


def _num_odd(values: Tensor) -> int:
    """How many are not finite."""
    return int((~values.isfinite()).sum())
