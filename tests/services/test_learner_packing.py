"""Packed rollouts have the scores and gradients that each has alone, under every attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.reference_varlen import varlen_attn_on_cpu
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from nouscoder.learner.model.kernels import SDPA_VARLEN, TORCH_VARLEN
from nouscoder.learner.model.logprobs import score_tokens
from nouscoder.learner.model.packed_attention import PACKED_ATTENTION, RowLayout
from nouscoder.learner.model.packing import MicroBatch, pack, pack_row
from nouscoder.learner.model.synthetic import random_batch, random_policy

CPU = torch.device("cpu")
ROLLOUTS = [graded.rollout for graded in random_batch(0, seed=2, prompt_tokens=7, max_tokens=60).rollouts]
WEIGHTS = torch.randn(10_000, generator=torch.Generator().manual_seed(1))


def gradient(model: PreTrainedModel, max_tokens: int, parts: list[MicroBatch] | None = None) -> Tensor:
    """That of a weighted sum of all log-probabilities and entropies, [parameters]; weights go with the targets."""
    model.zero_grad()
    for part in parts or pack(ROLLOUTS, max_tokens, CPU):
        weights = torch.cat([WEIGHTS[60 * i :][: ROLLOUTS[i].num_sampled_tokens] for i in part.rollout_indices])
        scores = score_tokens(model, part, entropy_gradient=True)
        torch.autograd.backward((weights * (scores.logprobs + 0.5 * scores.entropies)).sum())
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_the_gradients_of_packed_rollouts_are_those_of_each_rollout_alone() -> None:
    model = random_policy(0)
    alone = gradient(model, 1)
    (row,) = pack(ROLLOUTS, 10_000, CPU)
    assert len(RowLayout.of(row.layout.lengths, CPU).blocks) > 1, "lengths differ enough for several blocks"
    assert difference(gradient(model, 10_000), alone) < 1e-5
    assert difference(gradient(model, 128), alone) < 1e-5


def test_a_row_with_each_prompt_once_has_the_gradients_of_each_rollout_alone() -> None:
    model = random_policy(0)
    row = pack_row(ROLLOUTS, range(len(ROLLOUTS)), CPU, shares_prompts=True)
    prompts = {tuple(one.token_ids[: one.sampled_ranges()[0][0]]) for one in ROLLOUTS}
    of_prompts = sum(one.sampled_ranges()[0][0] for one in ROLLOUTS)
    whole = pack_row(ROLLOUTS, range(len(ROLLOUTS)), CPU)
    assert whole.input_ids.numel() - row.input_ids.numel() == of_prompts - sum(map(len, prompts)) > 0
    torch.testing.assert_close(score_tokens(model, row).logprobs, score_tokens(model, whole).logprobs)
    assert difference(gradient(model, 0, [row]), gradient(model, 1)) < 1e-5


def test_packed_attention_equals_the_attention_of_transformers() -> None:
    model = random_policy(0)
    packed = gradient(model, 10_000)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="one sequence each"):
        gradient(model, 10_000)
    assert difference(gradient(model, 1), packed) < 1e-5


@pytest.mark.parametrize("kernel", [SDPA_VARLEN, TORCH_VARLEN])
def test_varlen_kernels_have_the_gradients_of_padded_blocks(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nouscoder.learner.model.kernels.varlen_attn", varlen_attn_on_cpu)
    model = random_policy(0)
    blocks = gradient(model, 10_000)
    model.set_attn_implementation(kernel)
    assert difference(gradient(model, 10_000), blocks) < 1e-5


def test_packed_attention_keeps_a_sliding_window() -> None:
    config = Qwen3Config(
        vocab_size=random_policy(0).config.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = gradient(model, 10_000)
    model.set_attn_implementation("sdpa")
    assert difference(gradient(model, 1), packed) < 1e-5
    config.layer_types = ["full_attention"] * 2
    full = Qwen3ForCausalLM(config)
    full.load_state_dict(model.state_dict())
    assert difference(gradient(full, 1), packed) > 1e-3, "the window changes the gradients here"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_a_layout_has_every_position_once_and_little_padding(lengths: list[int]) -> None:
    layout = RowLayout.of(lengths, CPU)
    row = torch.arange(sum(lengths))
    assert torch.equal(row[layout.gather][layout.restore], row)
    assert sum(count * width for count, width in layout.blocks) == len(layout.gather) <= sum(lengths) / 0.75


@pytest.mark.parametrize("num_rows", [1, 2])
def test_without_a_layout_each_row_is_one_sequence(num_rows: int) -> None:
    model = random_policy(0)
    ids = torch.randint(3, 50, (num_rows, 20), generator=torch.Generator().manual_seed(0))
    packed = model(input_ids=ids).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(packed, model(input_ids=ids).logits)
