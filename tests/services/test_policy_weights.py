"""One reading of a policy's weights: learner, reward model and engines take the same tensors, or refuse by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen3MoeConfig

from nouscoder.config import load_config
from nouscoder.errors import Unusable
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.architecture import Architecture
from nouscoder.generation.engines.base import EngineError, EngineUnusable
from nouscoder.generation.engines.torch import TorchEngine
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.learner.model.weights import load_model, stored_dtypes
from nouscoder.policy_folder.compose import compose_policy
from nouscoder.policy_folder.inspection import weights_faults
from nouscoder.policy_folder.weights_files import INDEX_FILE, WEIGHTS_FILE, WeightsMissing, weights_files
from nouscoder.reward_model.model import load_reward_model, new_reward_model

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GATE = "model.layers.0.mlp.gate_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROTARY = "model.layers.1.self_attn.rotary_emb.inv_freq"
REFUSALS = (Unusable, EngineError, WeightsMissing)


def from_config(kind: Any, config: Any) -> Any:
    return kind.from_config(config)


def saved(folder: Path, seed: int = 0, *, tied: bool = False, shards: bool = False) -> Path:
    torch.manual_seed(seed)
    model = from_config(AutoModelForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=tied))
    model.save_pretrained(folder, max_shard_size="4KB" if shards else "5GB")
    return folder


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a folder with one file."""
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})


def in_learner(folder: Path) -> dict[str, Tensor]:
    return dict(load_model(folder).state_dict())


def in_torch_engine(folder: Path) -> dict[str, Tensor]:
    engine = TorchEngine(folder, max_running=1, max_tokens_total=8)
    engine.load_policy(weights_files(folder), 0)
    return dict(engine._decoder.model.state_dict())


def in_vllm(folder: Path) -> None:
    """The check before vLLM reads the files."""
    Architecture(folder).check(weights_files(folder), "policy version 0")


READERS = {
    "learner": in_learner,
    "reward model": new_reward_model,
    "torch engine": in_torch_engine,
    "vllm engine": in_vllm,
}


# What is refused


def no_gate(folder: Path) -> str:
    changed(saved(folder), lambda tensors: tensors.pop(GATE))
    return rf"{GATE}"


def no_shard(folder: Path) -> str:
    saved(folder, shards=True)
    file = next(file for file in weights_files(folder) if GATE in load_file(file))
    file.unlink()
    return file.name


def tensor_gone_from_its_shard(folder: Path) -> str:
    saved(folder, shards=True)
    file = next(file for file in weights_files(folder) if GATE in load_file(file))
    rest = {name: tensor for name, tensor in load_file(file).items() if name != GATE} or {ROTARY: torch.ones(2)}
    save_file(rest, file, {"format": "pt"})
    return GATE


def unknown_tensor(folder: Path) -> str:
    changed(saved(folder), lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)}))
    return r"model\.layers\.9\.mlp\.up_proj\.weight"


def other_shape(folder: Path) -> str:
    changed(saved(folder), lambda tensors: tensors.update({GATE: torch.ones(25, 16)}))
    return rf"{GATE} has shape \[25, 16\], .* needs \[24, 16\]"


def two_sources(folder: Path) -> str:
    saved(folder, 0, shards=True)
    shutil.copy(saved(folder.with_name("other"), 1) / WEIGHTS_FILE, folder)
    return rf"{WEIGHTS_FILE} and {INDEX_FILE}"


def other_head_than_the_tied_one(folder: Path) -> str:
    changed(saved(folder, tied=True), lambda tensors: tensors.update({HEAD: torch.ones(40, 16)}))
    return "tie_word_embeddings"


def damaged(folder: Path) -> str:
    file = saved(folder) / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-8])
    return WEIGHTS_FILE


FAULTS = (
    *(no_gate, no_shard, tensor_gone_from_its_shard, unknown_tensor, other_shape, two_sources),
    *(other_head_than_the_tied_one, damaged),
)
IN_HEADERS = (no_shard, tensor_gone_from_its_shard, two_sources, damaged)  # found without torch


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_reader_refuses_weights_that_do_not_fit_in_one_sentence(tmp_path: Path, fault: Any) -> None:
    folder = tmp_path / "policy"
    named = fault(folder)
    for reader, read in READERS.items():
        if reader == "reward model" and fault is other_head_than_the_tied_one:
            continue  # it has another head
        with pytest.raises(REFUSALS, match=named) as refused:
            read(folder)
        assert "\n" not in str(refused.value), reader
    assert bool(weights_faults(folder)) is (fault in IN_HEADERS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_engine_does_not_start_for_weights_that_do_not_fit(tmp_path: Path, fault: Any) -> None:
    folder = tmp_path / "policy"
    named = fault(folder)
    with pytest.raises(EngineUnusable, match=named):
        open_engine(load_config(None, []), folder, GenerationMetrics())


def test_a_reward_model_without_its_head_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, pad_token_id=0)
    config.num_labels = 1
    model = from_config(AutoModelForSequenceClassification, config)
    model.save_pretrained(tmp_path)
    load_reward_model(tmp_path)
    changed(tmp_path, lambda tensors: tensors.pop("score.weight"))
    with pytest.raises(Unusable, match=r"lacks score\.weight"):
        load_reward_model(tmp_path)


def test_a_missing_matrix_of_one_expert_is_refused(tmp_path: Path) -> None:
    experts = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    from_config(AutoModelForCausalLM, experts).save_pretrained(tmp_path)
    changed(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    for read in (in_learner, in_torch_engine, in_vllm):
        with pytest.raises(REFUSALS, match=r"model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
            read(tmp_path)
    assert weights_faults(tmp_path)


# What is read alike


def plain(folder: Path) -> None:
    saved(folder)


def sharded(folder: Path) -> None:
    saved(folder, shards=True)


def old_index(folder: Path) -> None:
    saved(folder, 0, shards=True)
    saved(folder, 1)
    assert (folder / INDEX_FILE).is_file()
    assert weights_files(folder) == (folder / WEIGHTS_FILE,)


def rotary_tables(folder: Path) -> None:
    changed(saved(folder), lambda tensors: tensors.update({ROTARY: torch.ones(4)}))


def tied(folder: Path) -> None:
    saved(folder, tied=True)


def tied_twice(folder: Path) -> None:
    changed(saved(folder, tied=True), lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))


def tied_by_its_head(folder: Path) -> None:
    changed(saved(folder, tied=True), lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))


@pytest.mark.parametrize(
    "kind",
    [plain, sharded, old_index, rotary_tables, tied, tied_twice, tied_by_its_head],
    ids=lambda kind: kind.__name__,
)
def test_learner_and_engine_read_the_same_tensors(tmp_path: Path, kind: Any) -> None:
    folder = tmp_path / "policy"
    kind(folder)
    assert weights_faults(folder) == []
    in_vllm(folder)
    learner, engine = in_learner(folder), in_torch_engine(folder)
    assert learner.keys() == engine.keys()
    assert all(torch.equal(tensor, engine[name]) for name, tensor in learner.items())
    assert ROTARY not in stored_dtypes(folder)


@pytest.mark.parametrize("kind", [sharded, old_index])
def test_a_copy_has_only_the_files_that_are_read(tmp_path: Path, kind: Any) -> None:
    first, copy = tmp_path / "policy", tmp_path / "copy"
    kind(first)
    (first / "additional_chat_templates").mkdir()
    (first / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    compose_policy(copy, first, first)
    assert (copy / INDEX_FILE).exists() is (kind is sharded)
    assert (copy / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    wanted, found = in_learner(first), in_learner(copy)
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
