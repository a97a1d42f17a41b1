"""`nouscoder bench learner`: tokens/s of a training step, compared with a bare forward and backward pass.

All have the same float32 policy, the same rollouts and no padding, on the CPU. The controls compute the logits of
every token and the cross-entropy of the next, and nothing else: `alone` one rollout after another, `packed` in the rows
of the learner. A step also computes advantages, ratios, the objective, all diagnostics, the norm of the gradient, and
AdamW. A batch of k steps computes pi_old too, with a further forward pass for k - 1 of k minibatches.

Each round measures all four, one after another, so that a slow moment of the machine meets them alike. Tokens are the
inputs of the model, as in `learner_tokens_per_second`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel

from nouscoder.bench.measuring import Machine
from nouscoder.bench.shaped_policy import shaped_policy
from nouscoder.config import Config, LearnerSection
from nouscoder.domain.batch import Batch
from nouscoder.domain.rollout import Rollout
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.model.packed_attention import PACKED_ATTENTION
from nouscoder.learner.model.packing import input_lengths, pack
from nouscoder.learner.model.synthetic import random_batch
from nouscoder.learner.trainer import Trainer

_STEPS_PER_BATCH = 4


@dataclass(frozen=True, slots=True)
class LearnerLoad:
    """The policy and the batch. As in real models, the head has about a tenth of the weights."""

    hidden_size: int = 256
    num_layers: int = 8
    vocabulary: int = 2048
    num_groups: int = 4
    group_size: int = 4
    prompt_tokens: int = 64
    max_tokens: int = 512
    row_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class LearnerBench:
    """The figures: medians over rounds, [tokens/s]. A share is that of the faster control in the same round."""

    num_cores: int
    load_average: float
    stolen_cpu_share: float
    threads: int
    num_rounds: int
    num_parameters: int
    num_rollouts: int
    num_tokens: int
    alone_tokens_per_second: float
    packed_tokens_per_second: float
    step_tokens_per_second: float
    batch_tokens_per_second: float
    step_share: float
    batch_share: float


def bench_learner(num_rounds: int = 5, threads: int = 1, load: LearnerLoad | None = None) -> LearnerBench:
    """Measure a step, a batch of four steps, and both controls, after one round that warms up."""
    load = load or LearnerLoad()
    prepare_thread(threads)
    machine = Machine()
    model, batch = policy_of(load), batch_of(load)
    rollouts = [graded.rollout for graded in batch.rollouts]
    num_tokens = sum(input_lengths(rollouts))
    works: dict[str, Callable[[], object]] = {
        "alone": lambda: bare_alone(model, rollouts),
        "packed": lambda: bare_packed(model, rollouts, load.row_tokens),
        "step": partial(trainer_of(load, 1).train_batch, batch),
        "batch": partial(trainer_of(load, _STEPS_PER_BATCH).train_batch, batch),
    }
    rounds = [{name: num_tokens / _seconds(work) for name, work in works.items()} for _ in range(num_rounds + 1)][1:]

    def median(name: str) -> float:
        return statistics.median(rates[name] for rates in rounds)

    def share(name: str) -> float:
        return statistics.median(rates[name] / max(rates["alone"], rates["packed"]) for rates in rounds)

    return LearnerBench(
        num_cores=machine.num_cores,
        load_average=machine.load_average,
        stolen_cpu_share=machine.stolen_share,
        threads=threads,
        num_rounds=num_rounds,
        num_parameters=model.num_parameters(),
        num_rollouts=len(rollouts),
        num_tokens=num_tokens,
        alone_tokens_per_second=median("alone"),
        packed_tokens_per_second=median("packed"),
        step_tokens_per_second=median("step"),
        batch_tokens_per_second=median("batch"),
        step_share=share("step"),
        batch_share=share("batch"),
    )


def policy_of(load: LearnerLoad) -> PreTrainedModel:
    """A Qwen3 policy with random weights from a fixed seed."""
    size, layers = load.hidden_size, load.num_layers
    policy = shaped_policy(
        (layers, size, 3 * size, 4, 2, size // 4, load.vocabulary), torch.device("cpu"), torch.float32
    )
    policy.set_attn_implementation(PACKED_ATTENTION)
    return policy


def batch_of(load: LearnerLoad) -> Batch:
    """Rollouts of random tokens and lengths from a fixed seed."""
    return random_batch(
        0,
        seed=0,
        num_groups=load.num_groups,
        group_size=load.group_size,
        prompt_tokens=load.prompt_tokens,
        max_tokens=load.max_tokens,
    )


def bare_alone(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> None:
    """The gradient of the summed cross-entropy, one rollout after another."""
    model.zero_grad(set_to_none=True)
    for (row,) in (pack([rollout], 1, model.device) for rollout in rollouts):
        _backward(model(input_ids=row.input_ids, use_cache=False).logits, row.positions, row.targets)


def bare_packed(model: PreTrainedModel, rollouts: Sequence[Rollout], row_tokens: int) -> None:
    """The same gradient, with the rollouts in rows of at most `row_tokens`."""
    model.zero_grad(set_to_none=True)
    for row in pack(rollouts, row_tokens, model.device):
        output = model(input_ids=row.input_ids, position_ids=row.position_ids, layout=row.layout, use_cache=False)
        _backward(output.logits, row.positions, row.targets)


def _backward(logits: Tensor, positions: Tensor, targets: Tensor) -> None:
    """Logits [1, length, vocabulary] of every token are there; only those of loss tokens are compared."""
    torch.autograd.backward(F.cross_entropy(logits[0, positions], targets, reduction="sum"))


def trainer_of(load: LearnerLoad, steps_per_batch: int) -> Trainer:
    """A trainer of the policy."""
    settings = LearnerSection(steps_per_batch=steps_per_batch, microbatch_tokens=load.row_tokens)
    return Trainer(policy_of(load), Config(learner=settings))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def as_text(result: LearnerBench) -> str:
    """For people."""
    return "\n".join(
        (
            f"policy                  {result.num_parameters / 1e6:.1f} million weights, {result.threads} threads",
            f"batch                   {result.num_rollouts} rollouts, {result.num_tokens} tokens",
            f"bare, rollouts alone    {result.alone_tokens_per_second:8.0f} tokens/s",
            f"bare, packed            {result.packed_tokens_per_second:8.0f} tokens/s",
            f"one step                {result.step_tokens_per_second:8.0f} tokens/s,"
            f" {result.step_share:.1%} of the faster bare pass",
            f"batch of {_STEPS_PER_BATCH} steps        {result.batch_tokens_per_second:8.0f} tokens/s,"
            f" {result.batch_share:.1%} (pi_old included)",
            f"machine                 {result.num_cores} cores, load {result.load_average:.1f} before,"
            f" {result.stolen_cpu_share:.1%} of the CPU taken by others",
        )
    )
