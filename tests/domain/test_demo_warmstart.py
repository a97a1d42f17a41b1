"""The warm start: it learns, is deterministic, trains only program tokens, and goes on after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from nouscoder.demo import warmstart
from nouscoder.demo.policy import EOS_ID, CharTokenizer, PolicySize, build_policy, save_policy
from nouscoder.demo.problems import Split, problems, prompt_of
from nouscoder.demo.warmstart import WarmStartBudget, demonstration_batches, warm_start
from nouscoder.policy_folder.pretrained import load_pretrained
from nouscoder.policy_folder.tokenizer import load_tokenizer

TINY = PolicySize(hidden_size=32, num_layers=1, intermediate_size=32, num_heads=2, num_key_value_heads=1, head_dim=16)
SHORT = WarmStartBudget(excerpt_steps=4, clean_steps=24, noisy_steps=4, batch_size=8, excerpt_batch_size=8)


def steps_of(budget: WarmStartBudget) -> int:
    return budget.excerpt_steps + budget.clean_steps + budget.noisy_steps


TRAIN = problems(Split.TRAIN, 70, seed=0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmstart, "build_policy", lambda *, seed: build_policy(seed=seed, size=TINY))


def test_the_loss_falls_and_every_step_is_reported(tmp_path: Path) -> None:
    seen: list[tuple[int, int, float]] = []
    warm_start(tmp_path / "policy", TRAIN, seed=0, budget=SHORT, on_progress=lambda *progress: seen.append(progress))
    assert [step for step, _, _ in seen] == list(range(1, steps_of(SHORT) + 1))
    assert {total for _, total, _ in seen} == {steps_of(SHORT)}
    losses = [loss for _, _, loss in seen]
    assert sum(losses[-3:]) / 3 < 0.8 * losses[SHORT.excerpt_steps]
    assert not (tmp_path / "warm-start").exists()


def test_the_same_seed_gives_the_same_policy_and_another_seed_another(tmp_path: Path) -> None:
    weights = []
    for index, seed in enumerate((3, 3, 4)):
        to = tmp_path / str(index) / "policy"
        warm_start(to, TRAIN, seed=seed, budget=replace(SHORT, clean_steps=2, noisy_steps=2))
        weights.append(load_file(to / "model.safetensors")["model.embed_tokens.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_interrupted_warm_start_gives_the_same_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmstart, "_CHECKPOINT_EVERY_STEPS", 3)
    budget = replace(SHORT, clean_steps=4, noisy_steps=2)
    whole, killed = tmp_path / "whole" / "policy", tmp_path / "killed" / "policy"
    warm_start(whole, TRAIN, seed=1, budget=budget)
    steps: list[int] = []

    def fail(done: int, total: int, loss: float) -> None:
        steps.append(done)
        if len(steps) == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        warm_start(killed, TRAIN, seed=1, budget=budget, on_progress=fail)
    assert not killed.exists()
    warm_start(killed, TRAIN, seed=1, budget=budget, on_progress=fail)
    assert steps == [1, 2, 3, 4, 5, *range(4, steps_of(budget) + 1)]
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_only_program_tokens_and_eos_are_in_the_loss() -> None:
    tokenizer = CharTokenizer()
    known = {
        (tuple(tokenizer.encode_prompt(prompt_of(problem))), (*tokenizer.encode(problem.program), EOS_ID))
        for problem in TRAIN
    }
    budget = replace(SHORT, excerpt_steps=0, clean_steps=3, noisy_steps=0)
    batches = demonstration_batches(TRAIN, seed=0, budget=budget)
    assert [len(batch) for batch in batches] == [SHORT.batch_size] * 3
    for batch in batches:
        for example in batch:
            assert [segment.is_sampled for segment in example.segments] == [False, True]
            assert (tuple(example.prompt_token_ids), tuple(example.sampled_token_ids)) in known


def test_a_policy_gives_the_same_outputs_after_loading(tmp_path: Path) -> None:
    policy = build_policy(seed=1, size=TINY)
    save_policy(policy, tmp_path)
    assert (tmp_path / "config.json").is_file()
    assert (tmp_path / "model.safetensors").is_file()
    ids = torch.tensor([load_tokenizer(tmp_path).encode("Read n.")])
    with torch.no_grad():
        saved = load_pretrained(Qwen3ForCausalLM, tmp_path, attn_implementation="sdpa", dtype=torch.float32)
        assert torch.equal(saved(input_ids=ids).logits, policy.train(False)(input_ids=ids).logits)


def test_building_a_policy_does_not_change_the_global_random_state() -> None:
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    first = build_policy(seed=2, size=TINY)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.lm_head.weight, build_policy(seed=2, size=TINY).lm_head.weight)
