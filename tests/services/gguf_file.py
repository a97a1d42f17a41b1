"""A tiny Llama with SmolLM's tokenizer as a GGUF file, written as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _byte_letters() -> list[str]:
    """GPT-2's letter of each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


# Special tokens, one letter for each byte, and what two merges make.
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_byte_letters(), "12", "is"]
_HEADS, _KEY_HEADS, _LAYERS, _WIDTH = 4, 2, 2, 64
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama() -> LlamaForCausalLM:
    """Random weights."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=_WIDTH,
        intermediate_size=96,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KEY_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def write_gguf(
    file: Path, model: LlamaForCausalLM, *, splits: str = "smollm", without: str = "", architecture: str = "llama"
) -> LlamaForCausalLM:
    """Write the model, its matrices as Q4_1. Returns it with the weights that the file then has."""
    import gguf
    from gguf.quants import dequantize, quantize

    q4 = gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(file, architecture)
    _describe(writer, model, splits)
    for name, weight in model.named_parameters():
        stored: Any = weight.detach().numpy()
        heads = {"q_proj": _HEADS, "k_proj": _KEY_HEADS}.get(name.split(".")[-2], 0)
        if weight.ndim == 2:
            packed = quantize(stored, q4)
            weight.data = torch.from_numpy(dequantize(packed, q4).copy())
            # llama.cpp rotates neighbouring columns, transformers the halves of a head.
            rows = (
                packed.reshape(heads, 2, -1, packed.shape[1]).swapaxes(1, 2).reshape(packed.shape) if heads else packed
            )
            if _name(name) != without:
                writer.add_tensor(_name(name), rows, raw_dtype=q4)
        else:
            writer.add_tensor(_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _model, _layers, number, *rest, kind = name.split(".")
    return f"blk.{number}.{_NAMES['.'.join(rest)]}.{kind}"


def _describe(writer: Any, model: LlamaForCausalLM, splits: str) -> None:
    config: Any = model.config
    writer.add_name("tiny")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KEY_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 3 + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["1 2", "i s"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
