"""Supervised fine-tuning: its loss is that of a loop written by hand, packed or not, and given tokens carry none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from nouscoder.config import Config, DecayKind, LearnerSection, OptimizerKind, PolicySection, RunSection, SftSection
from nouscoder.config.learner import SftScheduleSection
from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.rollout import Rollout
from nouscoder.errors import Unusable
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.state.checkpoint_store import CheckpointError
from nouscoder.sft.rollouts import Part, again, rollout_of
from nouscoder.sft.training import SupervisedTraining, training_config

NUM_STEPS, BATCH_SIZE, RATE = 4, 5, 1e-3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with random weights."""
    folder = tmp_path_factory.mktemp("first")
    write_policy_folder(folder, random_policy(0))
    return folder


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(3, CharTokenizer().vocab_size) for _ in range(count)]


def example(random: Random) -> list[Part]:
    """One to three turns of the policy, with given tokens before each."""
    sizes = [random.randint(2, 15) for _ in range(2 * random.randint(1, 3))]
    return [(tokens(random, size), bool(place % 2)) for place, size in enumerate(sizes)]


def examples(seed: int, count: int) -> list[list[Part]]:
    random = Random(seed)
    return [example(random) for _ in range(count)]


BATCHES = [examples(step, BATCH_SIZE) for step in range(NUM_STEPS)]


def as_batches(batches: Sequence[Sequence[Sequence[Part]]]) -> list[list[Rollout]]:
    return [[rollout_of(parts) for parts in batch] for batch in batches]


def config_of(first: Path, root: Path, num_steps: int = NUM_STEPS, **learner: Any) -> Config:
    """A constant learning rate without warm-up."""
    schedule = SftScheduleSection(warmup_share=0.0, decay=DecayKind.CONSTANT)
    sft = SftSection(learning_rate=RATE, weight_decay=0.1, adam_betas=(0.9, 0.95), schedule=schedule)
    run, policy = RunSection(root=root, name="tiny"), PolicySection(path=first)
    return training_config(Config(run=run, policy=policy, sft=sft, learner=LearnerSection(**learner)), num_steps)


def lines_of(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]


def trained(
    config: Config, batches: Sequence[Sequence[Rollout]], validation: Sequence[Rollout] = ()
) -> list[dict[str, Any]]:
    SupervisedTraining(config, batches, validation).run()
    return lines_of(config)


def loss_by_hand(model: Any, batch: Sequence[Sequence[Part]]) -> torch.Tensor:
    """The mean of -log p over all tokens that the policy wrote, one example after another, without packing."""
    total, count = torch.zeros((), dtype=torch.float64), 0  # exact sums of float32
    for parts in batch:
        ids = [token for part, _ in parts for token in part]
        in_loss = [flag for part, flag in parts for _ in part]
        logprobs = log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], dim=-1)
        for place in range(1, len(ids)):
            if in_loss[place]:
                total = total - logprobs[place - 1, ids[place]].double()
                count += 1
    return total / count


def test_the_loss_of_every_step_is_that_of_a_loop_written_by_hand(first: Path, tmp_path: Path) -> None:
    config = config_of(first, tmp_path)
    lines = trained(config, as_batches(BATCHES))
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for line, batch in zip(lines, BATCHES, strict=True):
        optimizer.zero_grad()
        loss = loss_by_hand(model, batch)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.max_gradient_norm)
        optimizer.step()
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert line["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert line["tokens"] == sum(len(part) for parts in batch for part, in_loss in parts if in_loss)
    assert lines[-1]["loss"] != pytest.approx(lines[0]["loss"], abs=1e-3)


def test_packed_examples_have_the_losses_of_examples_alone(first: Path, tmp_path: Path) -> None:
    packed = trained(config_of(first, tmp_path / "packed"), as_batches(BATCHES))
    alone = trained(config_of(first, tmp_path / "alone", microbatch_tokens=1), as_batches(BATCHES))
    assert [line["loss"] for line in packed] == pytest.approx([line["loss"] for line in alone], abs=1e-6)


def test_given_tokens_carry_no_loss(first: Path, tmp_path: Path) -> None:
    """A first step on two batches that differ only in which tokens are given: each has the loss of its own tokens."""
    parts = example(Random(7)) + example(Random(8))
    turned = [(ids, place > 0) for place, (ids, _) in enumerate(parts)]
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32, attn_implementation="eager")
    losses = []
    for name, one in (("given", parts), ("written", turned)):
        (line,) = trained(config_of(first, tmp_path / name, 1), as_batches([[one]]))
        assert line["loss"] == pytest.approx(loss_by_hand(model, [one]).item(), abs=1e-6)
        losses.append(line["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3


def test_the_validation_loss_is_measured_before_and_after_and_changes_nothing(first: Path, tmp_path: Path) -> None:
    validation = examples(99, 4)
    batches = as_batches(BATCHES)
    with_it = trained(config_of(first, tmp_path / "with"), batches, [rollout_of(parts) for parts in validation])
    without = trained(config_of(first, tmp_path / "without"), batches)
    assert [line["step"] for line in with_it if "validation_loss" in line] == [0, NUM_STEPS]
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32, attn_implementation="eager")
    assert with_it[0]["validation_loss"] == pytest.approx(loss_by_hand(model, validation).item(), abs=1e-6)
    assert [line["loss"] for line in with_it[1:]] == [line["loss"] for line in without]


def test_a_rollout_of_a_run_is_trained_on_at_temperature_1(first: Path, tmp_path: Path) -> None:
    sampled = [graded.rollout for graded in random_batch(0, seed=3, policy_version=4).rollouts]
    (line,) = trained(config_of(first, tmp_path, 1), [[again(rollout) for rollout in sampled]])
    parts = [[(rollout.prompt_token_ids, False), (rollout.sampled_token_ids, True)] for rollout in sampled]
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32, attn_implementation="eager")
    as_lists = [[(list(ids), in_loss) for ids, in_loss in one] for one in parts]
    assert line["loss"] == pytest.approx(loss_by_hand(model, as_lists).item(), abs=1e-6)


def test_muon_trains_the_matrices_of_the_layers_and_is_resumed_exactly(first: Path, tmp_path: Path) -> None:
    muon: dict[str, Any] = {"optimizer": OptimizerKind.MUON, "checkpoint_every_batches": 2}
    whole = config_of(first, tmp_path / "whole", **muon)
    training = SupervisedTraining(whole, as_batches(BATCHES))
    training.run()
    training.write_policy(tmp_path / "whole" / "model", "a card")
    stopped = config_of(first, tmp_path / "stopped", **muon)
    early = SupervisedTraining(stopped, as_batches(BATCHES[:2]))
    early.run()
    later = SupervisedTraining(stopped, as_batches(BATCHES))
    assert later.step == 2
    later.run()
    later.write_policy(tmp_path / "stopped" / "model", "a card")
    name = "model.layers.0.mlp.up_proj.weight"
    weights = [load_file(tmp_path / run / "model" / "model.safetensors") for run in ("whole", "stopped")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # An orthogonalised step of a matrix has singular values near 1, so the first one moves it by the learning rate.
    before = random_policy(0).state_dict()[name]
    one = config_of(first, tmp_path / "one", 1, optimizer=OptimizerKind.MUON)
    training = SupervisedTraining(one, as_batches(BATCHES[:1]))
    training.run()
    moved = training.trainer.model.state_dict()[name] - before * (1 - 0.1 * 0.02)
    found = torch.linalg.svdvals(moved) / (0.02 * (moved.shape[0] / moved.shape[1]) ** 0.5)
    assert float(found.median()) > 0.5
    assert float(found.max()) < 1.5


@pytest.mark.soak
def test_a_checkpoint_of_another_optimizer_is_refused(first: Path, tmp_path: Path) -> None:
    SupervisedTraining(config_of(first, tmp_path), as_batches(BATCHES[:2])).run()
    with pytest.raises(CheckpointError, match=r"learner\.optimizer"):
        SupervisedTraining(config_of(first, tmp_path, optimizer=OptimizerKind.MUON), as_batches(BATCHES))


def test_a_policy_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    policy = random_policy(0)
    with torch.no_grad():
        policy.model.norm.weight.fill_(float("nan"))
    write_policy_folder(tmp_path / "first", policy)
    with pytest.raises(Unusable, match="its own log-probabilities are not finite: its weights are damaged"):
        SupervisedTraining(config_of(tmp_path / "first", tmp_path), as_batches(BATCHES)).run()


@pytest.mark.soak
def test_a_base_that_was_replaced_under_adapters_is_refused(tmp_path: Path) -> None:
    write_policy_folder(tmp_path / "policy", random_policy(0))
    config = config_of(tmp_path / "policy", tmp_path, lora={"rank": 2})
    trained(config, as_batches(BATCHES[:2]))
    write_policy_folder(tmp_path / "policy", random_policy(1))
    with pytest.raises(Unusable, match=r"policy.path: a tensor in .*policy changed after the run"):
        SupervisedTraining(config, as_batches(BATCHES))


def test_fewer_steps_than_are_done_are_refused(first: Path, tmp_path: Path) -> None:
    SupervisedTraining(config_of(first, tmp_path), as_batches(BATCHES[:3])).run()
    with pytest.raises(Unusable, match="a checkpoint of step 3, but there are only 2 steps"):
        SupervisedTraining(config_of(first, tmp_path), as_batches(BATCHES[:2]))
