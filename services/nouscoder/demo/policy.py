"""The small policy: a Qwen3 decoder of a few hundred thousand parameters, with random weights or read from a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nouscoder.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, CharTokenizer


@dataclass(frozen=True, slots=True)
class PolicySize:
    """The sizes of the decoder. The defaults were chosen by measurements on one core."""

    hidden_size: int = 128
    num_layers: int = 3
    intermediate_size: int = 256
    num_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_positions: int = 192


def build_policy(*, seed: int, size: PolicySize = PolicySize(), vocab_size: int | None = None) -> Qwen3ForCausalLM:
    """A float32 policy whose random weights depend only on the seed. The global random state does not change."""
    config = Qwen3Config(
        vocab_size=vocab_size or CharTokenizer().vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        intermediate_size=size.intermediate_size,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_key_value_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.max_positions,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_policy(policy: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a Hugging Face folder: configuration, weights and tokenizer."""
    policy.save_pretrained(folder)
    CharTokenizer().save(folder)


def load_policy(folder: Path) -> Qwen3ForCausalLM:
    """Load a folder written by `save_policy`, in float32 with sdpa attention."""
    policy: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float32, local_files_only=True
    )
    return policy
