"""bfloat16 computes, float32 masters are trained, kept and published; any choice of memory resumes bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nouscoder.config import Config, LearnerSection
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.model.logprobs import score_tokens
from nouscoder.learner.model.packing import pack
from nouscoder.learner.model.synthetic import random_batch, random_policy
from nouscoder.learner.model.weights import put_weights
from nouscoder.learner.publication.publisher import StagedPolicy
from nouscoder.learner.state.checkpoint_store import CheckpointError, CheckpointStore, Progress, restore
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.base import LossInputs, MinibatchCounts, Needs, ObjectiveTerms

CPU = torch.device("cpu")
LEARNING_RATE, BETAS, WEIGHT_DECAY, EPS = 1e-3, (0.9, 0.99), 0.1, 1e-8
BF16: dict[str, Any] = {"dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@dataclass
class PolicyGradient:
    """- A log p of each token, divided by the number of tokens. Keeps the log-probabilities of the last batch."""

    needs: Needs = Needs()
    seen: list[Tensor] = field(default_factory=list)

    def __call__(self, inputs: LossInputs, counts: MinibatchCounts) -> ObjectiveTerms:
        self.seen.append(inputs.logprobs.detach())
        return ObjectiveTerms(-(inputs.advantages * inputs.logprobs).sum() / counts.num_tokens)


def config_of(**section: Any) -> Config:
    given = {
        "learning_rate": LEARNING_RATE,
        "adam_betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "steps_per_batch": 1,
        "max_gradient_norm": 1e9,
        "microbatch_tokens": 64,
    }
    return Config(learner=LearnerSection.model_validate({**given, **section}))


def trainer_of(objective: PolicyGradient | None = None, *, policy: int = 0, **section: Any) -> Trainer:
    return Trainer(random_policy(policy, tied=True), config_of(**section), objective=objective)


def masters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def rounded_policy(weights: dict[str, Tensor]) -> PreTrainedModel:
    """A policy whose weights are the given ones in bfloat16."""
    model = random_policy(1, tied=True)
    put_weights(model, weights, Path("masters"))
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    return model


def gradients_by_hand(weights: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """The gradients in bfloat16 of each micro-batch, added up in float32."""
    batch = random_batch(number, seed=1)
    rollouts = [graded.rollout for graded in batch.rollouts]
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    num_tokens = sum(rollout.num_sampled_tokens for rollout in rollouts)
    advantages = advantages_of(number)
    for part in pack(rollouts, 64, CPU, shares_prompts=True):
        model = rounded_policy(weights)
        scores = score_tokens(model, part).logprobs
        of_token = torch.tensor([advantages[part.rollout_indices[row]] for row in part.rollout_of_token.tolist()])
        torch.autograd.backward(-(of_token * scores).sum() / num_tokens)
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            assert weight.grad.dtype is torch.bfloat16
            total[name] += weight.grad.float()
    return total


def advantages_of(number: int) -> list[float]:
    """(R - mean) / standard deviation of each group of four; those of overlong rollouts are 0."""
    batch, result = random_batch(number, seed=1), []
    for start in range(0, len(batch.rollouts), 4):
        group = batch.rollouts[start : start + 4]
        rewards = torch.tensor([graded.reward for graded in group], dtype=torch.float64)
        for graded, value in zip(group, (rewards - rewards.mean()) / rewards.std(correction=0), strict=True):
            result.append(0.0 if graded.rollout.is_overlong else float(value))
    return result


def test_masters_are_those_of_a_loop_written_by_hand() -> None:
    trainer = trainer_of(PolicyGradient(), **BF16)
    first = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in masters(trainer).items()}
    second = {name: tensor.clone() for name, tensor in first.items()}
    for number in range(3):
        before = masters(trainer)
        trainer.train_batch(random_batch(number, seed=1))
        gradients = gradients_by_hand(before, number)
        for name, found in masters(trainer).items():
            gradient = gradients[name].double()
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * gradient
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * gradient**2
            mean, square = (
                moment / (1 - beta ** (number + 1))
                for moment, beta in zip((first[name], second[name]), BETAS, strict=True)
            )
            decayed = before[name].double() * (1 - LEARNING_RATE * WEIGHT_DECAY)
            expected = decayed - LEARNING_RATE * mean / (square.sqrt() + EPS)
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7, msg=name)
    assert all(weight.dtype is torch.float32 for weight in masters(trainer).values())
    steps_are_lost = [torch.equal(weight, weight.bfloat16().float()) for weight in masters(trainer).values()]
    assert not any(steps_are_lost), "masters that are rounded would lose small steps"


def test_the_published_policy_is_the_rounding_of_the_masters_and_what_the_learner_computes_with() -> None:
    objective = PolicyGradient()
    trainer = trainer_of(objective, **BF16)
    trainer.train_batch(random_batch(0, seed=1))
    staged = StagedPolicy.of(trainer.model, 1, 1, dict.fromkeys(masters(trainer), torch.bfloat16))
    weights = masters(trainer)
    assert staged.weights.keys() == weights.keys()
    assert all(torch.equal(staged.weights[name], weights[name].bfloat16()) for name in weights)
    objective.seen.clear()
    trainer.train_batch(random_batch(1, seed=1))
    parts = pack([graded.rollout for graded in random_batch(1, seed=1).rollouts], 64, CPU)
    published = rounded_policy({name: tensor.float() for name, tensor in staged.weights.items()})
    with torch.no_grad():
        expected = [score_tokens(published, part).logprobs for part in parts]
    for found, logprobs in zip(objective.seen, expected, strict=True):
        assert torch.equal(found, logprobs)


def test_a_gradient_in_bfloat16_is_near_that_in_float32() -> None:
    found = []
    for section in ({}, BF16):
        trainer = trainer_of(PolicyGradient(), **section)
        trainer.train_batch(random_batch(0, seed=1))
        found.append(
            torch.cat([weight.grad.flatten() for weight in trainer.model.parameters() if weight.grad is not None])
        )
    exact, rounded = found
    assert rounded.dtype is torch.float32
    assert float((rounded - exact).norm() / exact.norm()) < 0.05
    assert not torch.equal(rounded, exact)


def test_buffers_keep_their_type() -> None:
    trainer = trainer_of(**BF16)
    computing = trainer.computing
    assert computing is not trainer.model
    assert {weight.dtype for weight in computing.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in computing.buffers()} == {torch.float32}, "RoPE's frequencies must stay exact"


def test_a_cpu_that_keeps_the_states_gives_the_same_bits() -> None:
    found = []
    for states in ("float32", "cpu"):
        trainer = trainer_of(optimizer_states=states)
        losses = [step.loss for number in range(3) for step in trainer.train_batch(random_batch(number, seed=1)).steps]
        found.append((losses, masters(trainer)))
    (losses, weights), (of_cpu, weights_of_cpu) = found
    assert of_cpu == losses
    assert all(torch.equal(weights_of_cpu[name], weights[name]) for name in weights)


CHOICES: dict[str, dict[str, Any]] = {
    "bfloat16": BF16,
    "cpu": {"optimizer_states": "cpu"},
    "8bit": {"optimizer_states": "8bit"},
    "lora": {"lora": {"rank": 4}},
    "all": {**BF16, "optimizer_states": "8bit", "lora": {"rank": 4}, "activation_checkpointing": "full"},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(choice: str, tmp_path: Path) -> None:
    section = {**CHOICES[choice], "steps_per_batch": 2}
    trainer = trainer_of(**section)
    trainer.train_batch(random_batch(0, seed=1))
    CheckpointStore(tmp_path, keep=2).begin(trainer, Progress(2, 0)).finish()
    expected = [step.loss for step in trainer.train_batch(random_batch(1, seed=1)).steps]

    resumed = trainer_of(**section)
    checkpoint = CheckpointStore(tmp_path, keep=2).newest()
    assert checkpoint is not None
    restore(resumed, checkpoint)
    assert [step.loss for step in resumed.train_batch(random_batch(1, seed=1)).steps] == expected
    weights = masters(trainer)
    assert all(torch.equal(weight, weights[name]) for name, weight in masters(resumed).items())


def test_states_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    trainer = trainer_of(optimizer_states="8bit")
    trainer.train_batch(random_batch(0, seed=1))
    checkpoint = CheckpointStore(tmp_path, keep=2).begin(trainer, Progress(2, 0)).finish()
    with pytest.raises(CheckpointError, match=r"of another learner\.optimizer or learner\.optimizer_states: put back"):
        restore(trainer_of(), checkpoint)
