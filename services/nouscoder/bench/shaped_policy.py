"""Policies with the shapes of real ones and random weights, made on the device that they are used on."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from nouscoder.learner.model.computation import round_weights

# Layers, hidden size, MLP, heads, key heads, head size, vocabulary; embedding and head are one matrix.
SHAPES = {
    "tiny": (2, 32, 64, 2, 1, 16, 128),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936),
}


def shaped_policy(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A Qwen3 policy of this shape with random weights from a fixed seed, made on the device."""
    layers, hidden, inner, heads, key_heads, head_size, vocabulary = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_size,
        max_position_embeddings=2**20,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        policy = Qwen3ForCausalLM(config)
    return round_weights(policy, dtype, device)
