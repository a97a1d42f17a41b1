"""LoRA: adapters give the gradients of merged weights, only they are trained and kept, and policies are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import PreTrainedModel

from nouscoder.config import Config, LearnerSection, LoraSection
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.model.adapters import LoraLinear, add_adapters
from nouscoder.learner.model.logprobs import score_tokens
from nouscoder.learner.model.packing import pack
from nouscoder.learner.model.synthetic import random_batch, random_policy
from nouscoder.learner.publication.publisher import StagedPolicy
from nouscoder.learner.state.checkpoint_store import CheckpointStore, Progress
from nouscoder.learner.trainer import Trainer

CPU = torch.device("cpu")
LORA = LoraSection(rank=4, alpha=6.0, target_modules=("q_proj", "v_proj", "down_proj"))
SCALE = 6.0 / 4


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def adapted_policy(seed: int = 0) -> PreTrainedModel:
    """A policy with adapters whose matrices are all random."""
    model = random_policy(seed)
    add_adapters(model, LORA, seed=7)
    chance = torch.Generator().manual_seed(3)
    for layer in layers_of(model).values():
        layer.lora_b.data = 0.1 * torch.randn(layer.lora_b.shape, generator=chance)
    return model


def layers_of(model: PreTrainedModel) -> dict[str, LoraLinear]:
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, LoraLinear)}


def trainer_of(model: PreTrainedModel) -> Trainer:
    learner = LearnerSection(steps_per_batch=2, learning_rate=1e-2, microbatch_tokens=64, lora=LORA)
    return Trainer(model, Config(learner=learner))


def relative(one: Tensor | None, other: Tensor) -> float:
    assert one is not None
    return float((one - other).norm() / other.norm())


def test_gradients_are_those_of_merged_weights() -> None:
    adapted, merged = adapted_policy(), random_policy(0)
    for path, layer in layers_of(adapted).items():
        merged.get_parameter(f"{path}.weight").data += SCALE * layer.lora_b.detach() @ layer.lora_a.detach()
    rollouts = [graded.rollout for graded in random_batch(0, seed=2).rollouts]
    weights = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    for part in pack(rollouts, 64, CPU):
        scores = [score_tokens(model, part).logprobs for model in (adapted, merged)]
        torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
        for score in scores:
            torch.autograd.backward((score * weights[: len(score)]).sum())
    assert len(layers_of(adapted)) == 6, "three layers in each of two blocks"
    for path, layer in layers_of(adapted).items():
        of_merged = merged.get_parameter(f"{path}.weight").grad
        assert of_merged is not None
        # The chain rule of W' = W + s B A.
        assert relative(layer.lora_a.grad, SCALE * layer.lora_b.detach().T @ of_merged) < 1e-5, path
        assert relative(layer.lora_b.grad, SCALE * of_merged @ layer.lora_a.detach().T) < 1e-5, path
    frozen = [name for name, weight in adapted.named_parameters() if "lora_" not in name and weight.grad is not None]
    assert frozen == []


def test_only_adapters_are_trained_and_in_the_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_of(random_policy(0))
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train_batch(random_batch(0, seed=1))
    changed = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    adapters = {f"{path}.{name}" for path in layers_of(trainer.model) for name in ("lora_a", "lora_b")}
    assert changed == adapters
    optimized = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert optimized == {id(weight) for name, weight in trainer.model.named_parameters() if name in adapters}
    checkpoint = CheckpointStore(tmp_path, keep=1).begin(trainer, Progress(2, 0)).finish()
    stored = FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in stored if name.startswith("model.")} == adapters


def test_the_first_policy_is_that_without_adapters() -> None:
    plain, adapted = random_policy(0), random_policy(0)
    add_adapters(adapted, LORA, seed=7)
    (part,) = pack([graded.rollout for graded in random_batch(0, seed=2).rollouts], 10_000, CPU)
    assert torch.equal(score_tokens(plain, part).logprobs, score_tokens(adapted, part).logprobs)


def test_the_published_policy_has_whole_merged_weights() -> None:
    trainer = trainer_of(random_policy(0))
    trainer.train_batch(random_batch(0, seed=1))
    staged, plain = StagedPolicy.of(trainer.model, 1, 2).weights, random_policy(0).state_dict()
    assert staged.keys() == plain.keys()
    layers = layers_of(trainer.model)
    for name, weight in plain.items():
        path = name.removesuffix(".weight")
        if path not in layers:
            assert torch.equal(staged[name], weight), name
            continue
        product = layers[path].lora_b.detach().double() @ layers[path].lora_a.detach().double()
        torch.testing.assert_close(staged[name].double(), weight.double() + SCALE * product, rtol=1e-6, atol=1e-8)
        assert not torch.equal(staged[name], weight), name


def test_adapters_of_all_ranks_begin_alike_and_do_not_use_the_common_random_state() -> None:
    state = torch.get_rng_state()
    one, other = adapted_policy(), adapted_policy()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_learner_says_what_adapters_reach(caplog: pytest.LogCaptureFixture) -> None:
    """Only `train` and `sft` said it: of a learner started apart, nobody knew what stays frozen."""
    with caplog.at_level("INFO"):
        trainer_of(random_policy(0))
    (line,) = (record.getMessage() for record in caplog.records if "learner.lora" in record.getMessage())
    assert line.startswith("learner.lora: adapters of rank ")
    assert "of the decoder's weights" in line


def test_a_target_that_is_no_linear_layer_is_named() -> None:
    with pytest.raises(ValueError, match=r"^learner\.lora\.target_modules: input_layernorm is no linear layer"):
        add_adapters(random_policy(0), LoraSection(rank=2, target_modules=("q_proj", "input_layernorm")), seed=0)
