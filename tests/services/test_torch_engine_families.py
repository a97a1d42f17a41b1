"""Each model type of the torch engine, tiny and random, against a plain forward pass of transformers.

The plain pass has no cache and transformers' own attention. Requests of several lengths join and leave, so that prompts
are padded, rows have different lengths, and sequences grow beyond the window.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from nouscoder.domain.rollout import Sampling
from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines.base import EngineError, EngineUnusable, SampleRequest
from nouscoder.generation.engines.decoder import SLOTS_ATTENTION, slots_mask
from nouscoder.generation.engines.torch import TorchEngine
from nouscoder.policy_folder.engine_types import TORCH_ENGINE, VLLM
from nouscoder.policy_folder.inspection import context_tokens
from nouscoder.policy_folder.pretrained import build_model
from nouscoder.policy_folder.weights_files import weights_files

WINDOW, CAPACITY = 6, 40
# (prompt, completion)
LENGTHS = ((3, 13), (9, 4), (14, 3))
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.02,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Experts have several names.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
# What the configuration of a type needs besides, so that all its parts are in the model.
NEEDS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 2.0, "use_qk_norm": True},
    "cohere2": BOTH | {"logit_scale": 2.0},
    "cwm": BOTH,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "exaone4": BOTH,
    "gemma2": BOTH | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gemma3_text": BOTH | {"query_pre_attn_scalar": 8},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": [*BOTH["layer_types"], *BOTH["layer_types"]],
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
    },
    "glm4_moe_lite": LATENT,
    "gpt_oss": BOTH,
    "granite": {"logits_scaling": 0.5, "attention_multiplier": 0.5, "embedding_multiplier": 2.0},
    "minicpm3": LATENT | {"dim_model_base": 32, "scale_emb": 2},
    "ministral": BOTH,
    "olmo3": BOTH,
    "phi3": {"partial_rotary_factor": 0.5},
    "qwen2": BOTH | {"use_sliding_window": True},
    "qwen2_moe": BOTH | {"use_sliding_window": True},
    "qwen3": BOTH | {"use_sliding_window": True},
    "smollm3": {"no_rope_layers": [1, 0]},
    "vaultgemma": BOTH | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "youtu": LATENT,
}


def rope(kind: str, **settings: object) -> dict[str, Any]:
    """The setting of rotary positions of this kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


ROPES: dict[str, dict[str, Any]] = {
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=4.0),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "longrope": rope(
        "longrope",
        short_factor=[1.0, 1.5, 2.0, 2.5],
        long_factor=[2.0, 4.0, 8.0, 16.0],
        factor=4.0,
    )
    | {"original_max_position_embeddings": CAPACITY},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("model_type", sorted(TORCH_ENGINE))
def test_a_type_samples_with_the_log_probabilities_of_a_plain_forward_pass(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, model_type, NEEDS.get(model_type, {}))


@pytest.mark.parametrize("kind", ROPES)
def test_so_does_one_with_scaled_rotary_positions(tmp_path: Path, kind: str) -> None:
    check(tmp_path, "phi3" if kind == "longrope" else "llama", ROPES[kind])


def test_the_table_in_the_documents_has_each_type() -> None:
    text = Path("docs/design/generation.md").read_text()
    for number, known in ((3, TORCH_ENGINE), (4, VLLM)):
        run: set[str] = set()
        seen: set[str] = set()
        for row in re.findall(r"^\|.*`.*\|$", text, re.MULTILINE)[1:]:
            cells = row.split("|")
            types = set(re.findall(r"`(\w+)`", cells[2]))
            seen |= types
            assert re.fullmatch(r"yes|no|not `\w+`(, `\w+`)*", cells[number].strip()), row
            run |= set() if cells[number].strip() == "no" else types - set(re.findall(r"`(\w+)`", cells[number]))
        assert run == known & seen
        assert seen >= TORCH_ENGINE


@pytest.mark.parametrize("model_type", ["mamba", "mixtral", "codegen"])
def test_another_type_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    advice = "take another model" if model_type == "codegen" else 'set generation.engine to "vllm", which does'
    with pytest.raises(EngineUnusable, match=rf"^{tmp_path}: the torch engine does not run .* {model_type}.*{advice}$"):
        TorchEngine(tmp_path, max_running=2, max_tokens_total=CAPACITY)


def test_a_known_type_with_layers_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["linear_attention"]})
    )
    with pytest.raises(EngineUnusable, match="models of type qwen3 with layers of type linear_attention: set"):
        TorchEngine(tmp_path, max_running=2, max_tokens_total=CAPACITY)


def test_longrope_positions_end_where_the_frequencies_change(tmp_path: Path) -> None:
    saved(tmp_path, "phi3", ROPES["longrope"])
    engine = TorchEngine(tmp_path, max_running=2, max_tokens_total=64)
    with pytest.raises(EngineError, match=f"leaves no room in a total of {CAPACITY}"):
        engine.add(SampleRequest("r", [3] * CAPACITY, Sampling(max_new_tokens=1), frozenset()))
    assert context_tokens(tmp_path) == CAPACITY


def no_window(mask_function: object, **settings: Any) -> torch.Tensor | None:
    """A mask that forgets the model's window."""
    return slots_mask(mask_function=causal_mask_function, **settings)


def one_offset(q_offset: torch.Tensor | int, **settings: Any) -> torch.Tensor | None:
    """A mask that takes all rows for as long as the longest."""
    return slots_mask(
        q_offset=q_offset if isinstance(q_offset, int) else q_offset.max().expand(len(q_offset)), **settings
    )


@pytest.mark.parametrize("wrong", [no_window, one_offset])
def test_the_first_policy_is_refused_when_the_engine_computes_it_wrong(tmp_path: Path, wrong: Any) -> None:
    saved(tmp_path, "mistral", {"sliding_window": 512})
    engine = TorchEngine(tmp_path, max_running=2, max_tokens_total=CAPACITY)
    AttentionMaskInterface.register(SLOTS_ATTENTION, wrong)
    try:
        with pytest.raises(EngineError, match=r"computes this mistral wrong: a log-probability differs by .* from"):
            engine.load_policy(weights_files(tmp_path), 0)
    finally:
        AttentionMaskInterface.register(SLOTS_ATTENTION, slots_mask)
    engine.load_policy(weights_files(tmp_path), 0)


def check(root: Path, model_type: str, changes: dict[str, Any]) -> None:
    """Requests under one policy, an update while they run, and requests under the new policy."""
    model = saved(root / "0", model_type, changes)
    engine = TorchEngine(root / "0", max_running=2, max_tokens_total=CAPACITY)
    engine.load_policy(weights_files(root / "0"), 0)
    for request in requests_of("interrupted"):
        engine.add(request)
    for _ in range(3):
        engine.step()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(0.9)
    model.save_pretrained(root / "1")
    engine.load_policy(weights_files(root / "1"), 1)
    assert set(completions_of(engine)) == {request.request_id for request in requests_of("interrupted")}
    agrees(engine, model)


def agrees(engine: TorchEngine, model: PreTrainedModel) -> None:
    """The engine's log-probabilities are those of the model."""
    requests = requests_of("whole")
    for request in requests:
        engine.add(request)
    completions = completions_of(engine)
    found, wanted = [], []
    for request in requests:
        sampled = completions[request.request_id]
        assert len(sampled.token_ids) == request.sampling.max_new_tokens
        found += sampled.logprobs.tolist()
        wanted += plain_logprobs(model, request.prompt_token_ids, sampled)
    assert torch.tensor(wanted).std() > 0.2, "they must be far enough from uniform to tell a fault"
    assert found == pytest.approx(wanted, abs=1e-4)


def requests_of(name: str) -> list[SampleRequest]:
    """One request for each pair of lengths."""
    chance = torch.Generator().manual_seed(0)
    return [
        SampleRequest(
            f"{name} {number}",
            torch.randint(3, 96, (prompt,), generator=chance).tolist(),
            Sampling(max_new_tokens=completion, seed=number + 1),
            frozenset(),
        )
        for number, (prompt, completion) in enumerate(LENGTHS)
    ]


def completions_of(engine: TorchEngine) -> dict[str, Completion]:
    """Those of all requests."""
    found: dict[str, Completion] = {}
    while engine.num_running or engine.num_waiting:
        found |= dict(engine.step())
    return found


def plain_logprobs(model: PreTrainedModel, prompt: Sequence[int], sampled: Completion) -> list[float]:
    """The log-probability of each sampled token in one forward pass without a cache."""
    ids = torch.tensor([[*prompt, *sampled.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    chosen: list[float] = logprobs[at, ids[0, at + 1]].tolist()
    return chosen


def saved(folder: Path, model_type: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A random model of the type in a folder, with transformers' own attention."""
    config = AutoConfig.for_model(model_type, **(SIZES | changes))
    torch.manual_seed(0)
    model: Any = build_model(AutoModelForCausalLM, config, dtype=torch.float32, attn_implementation="eager")
    # As transformers draws them, weights are so small that attention hardly counts.
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.mul_(8)
            else:
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    loaded: PreTrainedModel = model.eval()
    return loaded
