"""The optimizer loop over one batch: k steps over disjoint minibatches of whole groups (PPO-off-policy-k).

INVARIANT: the state after `train_batch` hangs on the state before, the batch and the settings alone, bit for bit; so
a batch replayed from a checkpoint gives the very losses it gave the first time. If a loss, log-probability or gradient
is not finite, TrainingError is raised before the weights of that step are touched.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nouscoder.config import Config, LearnerSection
from nouscoder.domain.batch import Batch
from nouscoder.errors import NousCoderError
from nouscoder.learner.batch_statistics import BatchStatistics, ScoredRollout, minibatches, score, statistics_of
from nouscoder.learner.diagnostics import DiagnosticSums, TokenDiagnostics
from nouscoder.learner.logprobs import score_tokens
from nouscoder.learner.objectives.base import LossInputs, MinibatchCounts
from nouscoder.learner.objectives.registry import objective_of
from nouscoder.learner.packing import MicroBatch, pack


class TrainingError(NousCoderError):
    """Training cannot go on; the message names the step and what is not finite."""


class TrainingInterrupted(Exception):
    """The process is to end; the batch is left in the middle and must be trained from its checkpoint again."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step. `step` counts from 1; num_tokens are loss tokens; model_tokens were fed, without padding."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    num_tokens: int
    model_tokens: int
    duration_s: float
    diagnostics: TokenDiagnostics


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What `train_batch` did. duration_s includes the recomputation of the old log-probabilities."""

    batch_id: int
    steps: tuple[StepMetrics, ...]
    scored: tuple[ScoredRollout, ...]
    statistics: BatchStatistics
    duration_s: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens fed, without padding, a second of the whole."""
        return sum(step.model_tokens for step in self.steps) / self.duration_s


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """`old_logprobs` has one tensor [tokens] for each of `parts`; None where the policy still is the old one."""

    scored: Sequence[ScoredRollout]
    parts: list[MicroBatch]
    old_logprobs: Sequence[Tensor | None]


class Trainer:
    """Owns the model and its optimizer. All calls come from one thread."""

    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        settings = config.learner
        self._temperature = config.generation.sampling.temperature
        if self._temperature <= 0:
            raise ValueError("generation.sampling.temperature must be above 0 to train: greedy tokens have no ratio")
        self.model = model.to(settings.device)  # type: ignore[arg-type]
        # The ratios need the very distribution that is sampled from, so dropout stays off.
        self.model.eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            weight_decay=settings.weight_decay,
            foreach=True,
        )
        self.step = 0
        self._settings: LearnerSection = settings
        self._seed = config.run.seed
        self._objective = objective_of(settings)
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        """From any thread: have `train_batch` raise TrainingInterrupted before its next step."""
        self._interrupted.set()

    def train_batch(self, batch: Batch) -> TrainedBatch:
        """Take `steps_per_batch` optimizer steps on the batch. Raises TrainingError, or ValueError for a bad batch."""
        started = time.monotonic()
        groups = score(batch, self._settings.reward)
        cut = minibatches(groups, self._settings.steps_per_batch, self._seed, batch.batch_id)
        # Old log-probabilities are those before the first of the k steps: computed before any is taken. The first step
        # is taken by the old policy itself, so it needs no pass of its own.
        first, *later = cut
        prepared = [self._pack(first), *(self._with_old_logprobs(self._pack(scored)) for scored in later)]
        steps = tuple(self._take_step(minibatch) for minibatch in prepared)
        everyone = tuple(scored for group in groups for scored in group)
        return TrainedBatch(batch.batch_id, steps, everyone, statistics_of(everyone), time.monotonic() - started)

    def _pack(self, scored: Sequence[ScoredRollout]) -> _Minibatch:
        rollouts = [item.graded.rollout for item in scored]
        parts = pack(rollouts, self._settings.microbatch_tokens, self.model.device)
        return _Minibatch(scored, parts, [None] * len(parts))

    @torch.no_grad()
    def _with_old_logprobs(self, minibatch: _Minibatch) -> _Minibatch:
        old = [score_tokens(self.model, part, self._temperature).logprobs for part in minibatch.parts]
        if not all(bool(part.isfinite().all()) for part in old):
            raise TrainingError(f"a log-probability of the policy at step {self.step} is not finite")
        return replace(minibatch, old_logprobs=old)

    def _take_step(self, minibatch: _Minibatch) -> StepMetrics:
        if self._interrupted.is_set():
            raise TrainingInterrupted
        started = time.monotonic()
        counts = MinibatchCounts(sum(part.num_tokens for part in minibatch.parts), len(minibatch.scored))
        if not counts.num_tokens:
            raise TrainingError(f"step {self.step + 1} has no loss tokens")
        self.optimizer.zero_grad(set_to_none=True)
        sums = DiagnosticSums(self._settings.tis_cap)
        loss = 0.0
        for part, old in zip(minibatch.parts, minibatch.old_logprobs, strict=True):
            loss += self._backward(minibatch, part, old, counts, sums)
        norm = self._clip_gradient(loss)
        rate = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        rollouts = [item.graded.rollout for item in minibatch.scored]
        return StepMetrics(
            step=self.step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            num_tokens=counts.num_tokens,
            model_tokens=sum(len(r.prompt_token_ids) + len(r.token_ids) - 1 for r in rollouts),
            duration_s=time.monotonic() - started,
            diagnostics=sums.result(),
        )

    def _backward(
        self, minibatch: _Minibatch, part: MicroBatch, old: Tensor | None, counts: MinibatchCounts, sums: DiagnosticSums
    ) -> float:
        scores = score_tokens(self.model, part, self._temperature)
        advantages = [minibatch.scored[index].advantage for index in part.rollout_indices]
        inputs = LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=scores.logprobs.detach() if old is None else old,
            sampler_logprobs=part.sampler_logprobs,
            advantages=torch.tensor(advantages, dtype=torch.float32, device=self.model.device),
            rollout_of_token=part.rows,
        )
        terms = self._objective(inputs, counts)
        loss = float(terms.loss.detach())
        if not math.isfinite(loss):
            raise TrainingError(f"the loss of step {self.step + 1} is {loss}")
        if not bool(scores.logprobs.isfinite().all()):
            raise TrainingError(f"a log-probability in step {self.step + 1} is not finite")
        torch.autograd.backward(terms.loss)
        sums.add(inputs, terms, scores.entropies)
        return loss

    def _clip_gradient(self, loss: float) -> float:
        """Cap the gradient's norm; returns the norm before. Raises TrainingError when it is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_gradient_norm))
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient of step {self.step + 1} has norm {norm} (its loss is {loss})")
        return norm

    def _learning_rate(self) -> float:
        """Linear warm-up to the configured rate, which the first step after it has in full."""
        warmup = self._settings.warmup_steps
        return self._settings.learning_rate * min(1.0, (self.step + 1) / (warmup + 1))
