"""The short supervised phase before reinforcement learning: next-token loss on demonstrations.

There are three stages: excerpts of right demonstrations whose width grows (excerpts.py), whole right demonstrations,
and noisy ones (noise.py), which set the error rate of the finished policy. Only program tokens and the eos are in the
loss. Sequences are padded on the right, so causal attention needs no mask. A batch holds sequences of similar length.

Muon (Jordan et al. 2024, orthogonalised momentum) trains the matrices, because the policy then learns to copy in a
third of the steps that AdamW takes. AdamW trains the embedding and the norms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from nouscoder.demo.excerpts import excerpt
from nouscoder.demo.noise import NOISE_PROBABILITY, demonstrate
from nouscoder.demo.problems import DemoProblem, prompt_of
from nouscoder.demo.tokenizer import EOS_ID, PAD_ID, CharTokenizer

_IGNORED = -100
_BATCHES_A_BUCKET = 10
_WIDEST = 60  # characters; wider than any statement or program

Row = tuple[list[int], list[int]]  # token ids of the prompt and of the program


@dataclass(frozen=True, slots=True)
class WarmStartBudget:
    """The settings of the supervised phase. The steps of the stages add up to `num_steps`."""

    excerpt_steps: int = 230
    clean_steps: int = 90
    noisy_steps: int = 150
    excerpt_batch_size: int = 48
    batch_size: int = 32
    matrix_learning_rate: float = 0.02
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    final_share: float = 0.02
    max_gradient_norm: float = 1.0
    noise_probability: float = NOISE_PROBABILITY

    @property
    def num_steps(self) -> int:
        """The steps of all stages."""
        return self.excerpt_steps + self.clean_steps + self.noisy_steps


@dataclass(frozen=True, slots=True)
class WarmStartProgress:
    """The progress after a step. `loss` is in nats per program token."""

    step: int
    num_steps: int
    loss: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class WarmStartMetrics:
    """Figures of the whole phase. `final_loss` is the mean of the last twentieth of the steps."""

    num_steps: int
    num_tokens: int
    final_loss: float
    duration_s: float


class WarmStartError(RuntimeError):
    """The supervised phase cannot continue. The message says why."""


def warm_start(
    policy: Qwen3ForCausalLM,
    problems: Sequence[DemoProblem],
    *,
    seed: int,
    budget: WarmStartBudget,
    on_progress: Callable[[WarmStartProgress], None] = lambda progress: None,
) -> WarmStartMetrics:
    """Train the policy in place on demonstrations. Raises WarmStartError when the loss is not finite."""
    return fit(policy, demonstration_batches(problems, seed=seed, budget=budget), budget, on_progress)


def fit(
    policy: Qwen3ForCausalLM,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    budget: WarmStartBudget,
    on_progress: Callable[[WarmStartProgress], None] = lambda progress: None,
) -> WarmStartMetrics:
    """Train the policy in place on `budget.num_steps` batches as `padded` makes them. Raises WarmStartError."""
    started = time.monotonic()
    optimizers = _optimizers(policy, budget)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    losses: list[float] = []
    num_tokens = 0
    policy.train()
    for step, (inputs, targets) in enumerate(batches):
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * _schedule(step, budget)
        logits = policy(input_ids=inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), budget.max_gradient_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        num_tokens += inputs.numel()
        if not math.isfinite(losses[-1]):
            raise WarmStartError(f"the supervised loss became {losses[-1]} at step {step}")
        on_progress(WarmStartProgress(step + 1, budget.num_steps, losses[-1], time.monotonic() - started))
    policy.train(False)
    tail = losses[-max(1, len(losses) // 20) :]
    return WarmStartMetrics(budget.num_steps, num_tokens, sum(tail) / len(tail), time.monotonic() - started)


def demonstration_batches(
    problems: Sequence[DemoProblem], *, seed: int, budget: WarmStartBudget
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`num_steps` pairs of inputs and targets, each [batch, positions]. The loss ignores prompts and padding."""
    random = Random(f"{seed}/demonstrations")
    tokenizer = CharTokenizer()
    for step in range(budget.excerpt_steps):
        width = 1 + _WIDEST * step // budget.excerpt_steps
        yield padded(_excerpt_rows(problems, width, budget.excerpt_batch_size, random, tokenizer))
    for steps, noise in ((budget.clean_steps, 0.0), (budget.noisy_steps, budget.noise_probability)):
        for first in range(0, steps, _BATCHES_A_BUCKET):
            num_batches = min(_BATCHES_A_BUCKET, steps - first)
            rows = [
                _row(tokenizer, prompt_of(problem), demonstrate(problem, random, noise=noise), ended=True)
                for problem in random.choices(problems, k=budget.batch_size * num_batches)
            ]
            rows.sort(key=lambda row: len(row[0]) + len(row[1]))
            buckets = [rows[k : k + budget.batch_size] for k in range(0, len(rows), budget.batch_size)]
            random.shuffle(buckets)
            yield from map(padded, buckets)


def _excerpt_rows(
    problems: Sequence[DemoProblem], width: int, num_rows: int, random: Random, tokenizer: CharTokenizer
) -> list[Row]:
    """Rows of excerpts. At least a third have text parameters, which are rarer and harder to copy than numbers."""
    texts = [problem for problem in problems if isinstance(problem.parameters[0], str)] or problems
    rows: list[Row] = []
    for index in range(num_rows):
        problem = random.choice(texts if index % 3 == 0 else problems)
        prompt, program, ended = excerpt(problem, random.randint(0, width), random)
        rows.append(_row(tokenizer, prompt, program, ended=ended))
    return rows


def _row(tokenizer: CharTokenizer, prompt: str, program: str, *, ended: bool) -> Row:
    return tokenizer.encode_prompt(prompt), tokenizer.encode(program) + ([EOS_ID] if ended else [])


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of next-token prediction, each [rows, positions]. The loss ignores prompts and padding."""
    width = max(len(prompt) + len(program) for prompt, program in rows) - 1
    inputs = torch.full((len(rows), width), PAD_ID)
    targets = torch.full((len(rows), width), _IGNORED)
    for index, (prompt, program) in enumerate(rows):
        both = torch.tensor(prompt + program)
        inputs[index, : len(both) - 1] = both[:-1]
        targets[index, len(prompt) - 1 : len(both) - 1] = both[len(prompt) :]
    return inputs, targets


def _schedule(step: int, budget: WarmStartBudget) -> float:
    """The share of the learning rate: a linear warm-up, then a cosine decay to `final_share`."""
    if step < budget.warmup_steps:
        return (step + 1) / budget.warmup_steps
    done = (step - budget.warmup_steps) / max(1, budget.num_steps - budget.warmup_steps)
    return budget.final_share + (1 - budget.final_share) * 0.5 * (1 + math.cos(math.pi * done))


def _optimizers(policy: Qwen3ForCausalLM, budget: WarmStartBudget) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the decoder layers, AdamW for the embedding and the norms."""
    matrices = [weight for weight in policy.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in policy.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=budget.matrix_learning_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=budget.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
