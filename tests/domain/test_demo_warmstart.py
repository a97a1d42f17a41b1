"""The supervised phase: it learns, is deterministic, trains only program tokens, and reports a broken policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nouscoder.demo.policy import PolicySize, build_policy, load_policy, save_policy
from nouscoder.demo.problems import Split, problems, prompt_of
from nouscoder.demo.tokenizer import EOS_ID, CharTokenizer
from nouscoder.demo.warmstart import (
    WarmStartBudget,
    WarmStartError,
    WarmStartProgress,
    demonstration_batches,
    warm_start,
)
from nouscoder.policy_folder.tokenizer import load_tokenizer

TINY = PolicySize(hidden_size=32, num_layers=1, intermediate_size=32, num_heads=2, num_key_value_heads=1, head_dim=16)
SHORT = WarmStartBudget(excerpt_steps=4, clean_steps=24, noisy_steps=4, batch_size=8, excerpt_batch_size=8)
TRAIN = problems(Split.TRAIN, 70, seed=0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_loss_falls_and_every_step_is_reported() -> None:
    seen: list[WarmStartProgress] = []
    metrics = warm_start(build_policy(seed=0, size=TINY), TRAIN, seed=0, budget=SHORT, on_progress=seen.append)
    assert [progress.step for progress in seen] == list(range(1, SHORT.num_steps + 1))
    whole = [progress.loss for progress in seen[SHORT.excerpt_steps :]]
    assert metrics.final_loss < 0.8 * whole[0]
    assert metrics.num_steps == SHORT.num_steps
    assert metrics.num_tokens > 0


def test_the_same_seed_gives_the_same_policy_and_another_seed_another() -> None:
    weights = []
    for seed in (3, 3, 4):
        policy = build_policy(seed=seed, size=TINY)
        warm_start(policy, TRAIN, seed=seed, budget=replace(SHORT, clean_steps=2, noisy_steps=2))
        weights.append(policy.lm_head.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_only_program_tokens_and_eos_are_targets() -> None:
    tokenizer = CharTokenizer()
    known = {(*tokenizer.encode(problem.program), EOS_ID) for problem in TRAIN}
    prompts = {tuple(tokenizer.encode_prompt(prompt_of(problem))) for problem in TRAIN}
    budget = replace(SHORT, excerpt_steps=0, clean_steps=3, noisy_steps=0)
    batches = list(demonstration_batches(TRAIN, seed=0, budget=budget))
    assert len(batches) == 3
    for inputs, targets in batches:
        for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
            kept = [token for token in target if token >= 0]
            first = next(index for index, token in enumerate(target) if token >= 0)
            assert tuple(kept) in known
            assert tuple(row[: first + 1]) in prompts


def test_a_policy_that_is_not_finite_is_reported() -> None:
    policy = build_policy(seed=0, size=TINY)
    with torch.no_grad():
        policy.model.norm.weight.fill_(float("nan"))
    with pytest.raises(WarmStartError, match="nan at step 0"):
        warm_start(policy, TRAIN, seed=0, budget=SHORT)


def test_a_policy_gives_the_same_outputs_after_loading(tmp_path: Path) -> None:
    policy = build_policy(seed=1, size=TINY)
    save_policy(policy, tmp_path)
    assert (tmp_path / "config.json").is_file()
    assert (tmp_path / "model.safetensors").is_file()
    ids = torch.tensor([load_tokenizer(tmp_path).encode("Read n.")])
    with torch.no_grad():
        assert torch.equal(load_policy(tmp_path)(input_ids=ids).logits, policy.train(False)(input_ids=ids).logits)


def test_building_a_policy_does_not_change_the_global_random_state() -> None:
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    first = build_policy(seed=2, size=TINY)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.lm_head.weight, build_policy(seed=2, size=TINY).lm_head.weight)
