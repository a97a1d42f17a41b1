"""Models of several families, types and shards: each is published in its own type, sampled from, and trained."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM as Models
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from nouscoder.config import Config, load_config
from nouscoder.demo.policy import EOS_ID, CharTokenizer
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.model.synthetic import random_batch
from nouscoder.policy_folder.identity import weights_digest
from nouscoder.policy_folder.inspection import faults_of
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.policy_folder.weights_files import weights_files
from nouscoder.run.evaluation import first_policy

LIMIT_S = 300.0
PROMPT = (3, 4, 5)
SIZES: dict[str, Any] = {
    "vocab_size": CharTokenizer().vocab_size,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "eos_token_id": EOS_ID,
}
DENSE = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
EXPERTS = partial(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
WINDOW: dict[str, Any] = {"sliding_window": 4}
LAYERS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
OTHERS = {
    "mistral": partial(MistralConfig, **WINDOW),
    "gemma3_text": partial(Gemma3TextConfig, head_dim=16, query_pre_attn_scalar=16, **LAYERS),
    "phi3": partial(Phi3Config, pad_token_id=0, **WINDOW),
    "olmo3": partial(Olmo3Config, **LAYERS),
    "smollm3": partial(SmolLM3Config, pad_token_id=0, no_rope_layers=[1, 0]),
}
FAMILIES: dict[str, Any] = {**DENSE, "qwen3_moe": EXPERTS, **OTHERS}


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", DENSE)
async def test_a_policy_is_published_in_its_own_type_sampled_from_and_trained(
    tmp_path: Path, family: str, dtype: torch.dtype, max_shard_size: str
) -> None:
    await check(tmp_path, family, dtype, max_shard_size)


@pytest.mark.parametrize("family", OTHERS)
async def test_so_is_one_with_windows_or_positions_of_its_own(tmp_path: Path, family: str) -> None:
    await check(tmp_path, family, torch.bfloat16, "5GB")


async def test_so_is_one_with_experts(tmp_path: Path) -> None:
    await check(tmp_path, "qwen3_moe", torch.bfloat16, "10KB")


async def check(tmp_path: Path, family: str, dtype: torch.dtype, max_shard_size: str) -> None:
    """The policy goes through learner and engine."""
    folder = tmp_path / "policy"
    model = saved_model(folder, family, dtype, max_shard_size)
    assert (len(weights_files(folder)) > 1) is (max_shard_size == "10KB")
    assert faults_of(folder) == []
    config = load_config(
        None,
        [
            f'run.root="{tmp_path}"',
            f'policy.path="{folder}"',
            "generation.max_running=2",
            "generation.max_tokens_total=64",
            "learner.policy_shard_bytes=20000",
            "learner.steps_per_batch=1",
            "learner.learning_rate=0.01",
            "broker.batch_size=16",
            "broker.group_size=4",
        ],
    )
    core = LearnerCore(config)
    core.start()
    try:
        first = published(core)
        manifest = core.write_policy(core.stage_policy())
        assert manifest.weights == first_policy(config).weights == weights_digest(weights_files(folder))
        assert {name: tensor.dtype for name, tensor in first.items()} == dict.fromkeys(first, dtype)
        original = tensors_of(weights_files(folder))
        assert all(torch.equal(tensor, original[name]) for name, tensor in first.items()), "untrained: bit for bit"
        completion = await completion_of(config, folder, 0)
        assert completion.logprobs.tolist() == pytest.approx(fresh_logprobs(model, completion), abs=1e-4)

        assert core.model.dtype is torch.float32, "the optimizer works on an exact copy"
        core.train(random_batch(0, seed=1))
        second = published(core)
    finally:
        core.close()
    assert {tensor.dtype for tensor in second.values()} == {dtype}
    assert not torch.equal(second["model.embed_tokens.weight"], first["model.embed_tokens.weight"])
    await completion_of(config, folder, 1)


def saved_model(folder: Path, family: str, dtype: torch.dtype, max_shard_size: str) -> PreTrainedModel:
    """A random model in a Hugging Face folder, with the demo's tokenizer."""
    torch.manual_seed(0)
    model: PreTrainedModel = Models.from_config(FAMILIES[family](**SIZES), dtype=dtype)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    CharTokenizer().save(folder)
    return model


def published(core: LearnerCore) -> dict[str, torch.Tensor]:
    """Publish the policy. Returns the tensors of its files."""
    manifest = core.write_policy(core.stage_policy())
    assert len(manifest.shards) > 1
    return tensors_of(Path(manifest.folder, shard.name) for shard in manifest.shards)


def tensors_of(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """The stored tensors by name, in their own types."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - a shard is not iterable
    return found


async def completion_of(config: Config, folder: Path, version: int) -> Completion:
    """A completion of the published policy `version` by the torch engine."""
    files = weights_files(config.run.folder / "policies" / f"{version:08d}")
    request = SampleRequest("r", PROMPT, Sampling(max_new_tokens=8, seed=5), load_tokenizer(folder).stop_ids)
    async with open_engine(config, folder, GenerationMetrics()) as engine:
        await asyncio.wait_for(engine.load_policy(files, version), LIMIT_S)
        return await asyncio.wait_for(engine.sample(request), LIMIT_S)


def fresh_logprobs(model: PreTrainedModel, completion: Completion) -> list[float]:
    """The log-probability of each sampled token in a plain forward pass of transformers, in float32."""
    ids = [*PROMPT, *completion.token_ids.tolist()]
    with torch.no_grad():
        exact = model.float()  # type: ignore[no-untyped-call]
        logprobs = exact(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logprobs[at - 1, ids[at]]) for at in range(len(PROMPT), len(ids))]
