"""Small random models of many types of transformers: two layers or four, and windows that short sequences show."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nouscoder.demo.policy import EOS_ID, PAD_ID, CharTokenizer

WINDOW = 4
_SIZES: dict[str, Any] = {
    "vocab_size": CharTokenizer().vocab_size,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    **_ROUTED,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
_GRANITE: dict[str, Any] = {"logits_scaling": 4.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5}
_GPT: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}
_HEAD: dict[str, Any] = {"head_dim": 16}
_WINDOW: dict[str, Any] = {"sliding_window": WINDOW}
_SOME_WINDOWS: dict[str, Any] = {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}

# What differs from _SIZES, by model type.
TYPES: dict[str, dict[str, Any]] = {
    "afmoe": {**_EXPERTS, **_WINDOW, "head_dim": 8},
    "apertus": {},
    "arcee": {},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bloom": {"n_head": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**_WINDOW, "logit_scale": 0.25},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": {**_ROUTED, "routed_scaling_factor": 1.0},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": _WINDOW,
    "falcon": {},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "falcon_mamba": {"state_size": 8},
    "gemma": _HEAD,
    "gemma2": {**_HEAD, **_WINDOW},
    "gemma3_text": {**_HEAD, **_WINDOW},
    "gemma4_text": {**_HEAD, **_WINDOW},
    "glm": _HEAD,
    "glm4": _HEAD,
    "glm4_moe": {**_ROUTED, **_HEAD},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gpt_neox": {},
    "gpt_oss": {**_HEAD, **_LOCAL, **_WINDOW},
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": _GRANITE,
    "granitemoe": {**_LOCAL, **_GRANITE},
    "granitemoehybrid": {
        **_LOCAL,
        **_GRANITE,
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
    },
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "internlm3": {},
    "jamba": {
        **_EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "llama": {},
    "llama4_text": {
        **_HEAD,
        **_LOCAL,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "interleave_moe_layer_step": 2,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "minicpm3": _LATENT,
    "minimax": {**_LOCAL, "layer_types": ["linear_attention", "full_attention"]},
    "minimax_m2": {**_LOCAL, **_HEAD, "rotary_dim": 8},
    "ministral": {"head_dim": 8, **_WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "ministral3": {"head_dim": 8},
    "mistral": _WINDOW,
    "mixtral": {**_LOCAL, **_WINDOW},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "nanochat": {"final_logit_softcapping": 15.0},
    "nemotron": {},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 16,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmo_hybrid": {**_LINEAR, "linear_num_key_heads": 4},
    "olmoe": _EXPERTS,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": _WINDOW,
    "phimoe": _LOCAL,
    "qwen2": _SOME_WINDOWS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": {**_HEAD, **_SOME_WINDOWS},
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _LINEAR,
    "qwen3_moe": {**_HEAD, **_EXPERTS},
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 32},
    "roberta": {},
    "rwkv": {},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {**_ROUTED, "head_dim": 8},
    "stablelm": {},
    "starcoder2": _WINDOW,
    "xglm": {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 64},
    "xlstm": {"num_heads": 4},
    "bert": {},
    "big_bird": {},
    "doge": {"keep_window_size": WINDOW},
    "modernbert-decoder": {"bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2},
}


def tiny_model(model_type: str, seed: int = 0, std: float = 0.3, **changes: Any) -> PreTrainedModel:
    """A model in float32 with weights so large that attention, states and caps of logits matter."""
    config = AutoConfig.for_model(model_type, **{**_SIZES, **TYPES[model_type], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        for parameter in dict.fromkeys(model.parameters()):
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0.0, std)
    return model.eval()  # type: ignore[no-any-return,no-untyped-call]
