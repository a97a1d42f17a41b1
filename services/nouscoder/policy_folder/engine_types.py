"""Which engine samples from a model, by its type.

The model's type, as transformers has it, tells which engine samples from it. Those of the torch engine are each
compared with a plain forward pass in tests/services/test_torch_engine_families.py. Those of vLLM are the language
models in its registry, of the version that pyproject.toml pins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

VLLM_VERSION = "0.32.0"


def _types(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCH_ENGINE = _types(
    """
    apertus arcee cohere cohere2 cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 exaone4 gemma gemma2 gemma3_text gemma4_text
    glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_oss granite helium hunyuan_v1_dense hunyuan_v1_moe internlm3
    jais2 llama minicpm3 ministral ministral3 mistral nemotron olmo olmo2 olmo3 olmoe opt phi phi3 qwen2 qwen2_moe qwen3
    qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma youtu
    """
)
_ATTENTION = frozenset({"full_attention", "sliding_attention"})

VLLM = _types(
    """
    afmoe apertus arcee axk1 bloom cohere cohere2 cohere2_moe cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3 gemma3_text
    gemma3n gemma3n_text gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox
    gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jamba kimi_linear laguna lfm2 lfm2_moe llama
    llama4 llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax_m2 ministral3 mistral mixtral
    nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2 vaultgemma zamba2
    """
)
# Language models of transformers that vLLM runs neither itself nor through transformers.
_NOT_VLLM = _types("codegen cpmant gpt_neo gpt_neox_japanese mpt openai-gpt rwkv xglm xlnet")

# How a user takes vLLM in a configuration.
_HOW = 'set generation.engine to "vllm"'


def engine_fault(engine: str, model_type: str, layer_types: Collection[str] = (), how: str = _HOW) -> str:
    """Why an engine cannot run models of a type, in one sentence; "" when nothing is known against it.

    `layer_types`: of the layers, where the configuration names them. `how`: what a user does to take vLLM.
    """
    if engine == "vllm":
        return f"vLLM {VLLM_VERSION} does not run models of type {model_type}" if model_type in _NOT_VLLM else ""
    strange = sorted(set(layer_types) - _ATTENTION)
    if engine == "fake" or (model_type in TORCH_ENGINE and not strange):
        return ""
    what = f"models of type {model_type}" + (f" with layers of type {strange[0]}" if strange else "")
    if model_type in VLLM:
        return f"the torch engine does not run {what}: {how}, which does"
    return f"the torch engine does not run {what}, and vLLM {VLLM_VERSION} does not list them: take another model"


def positions_of(config: Mapping[str, Any]) -> int | None:
    """The number of positions that a model's configuration is for; None when it does not say.

    Longrope (arXiv 2402.13753) has other frequencies for longer sequences than the first training had. A sequence that
    grows beyond that length would change the meaning of its own earlier keys, and the parts of a run would disagree on
    the frequencies. So its positions end there.
    """
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(positions, int):
        return None
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
            key = "original_max_position_embeddings"
            positions = min(positions, int(config.get(key) or rope.get(key) or positions))
    return int(positions)
