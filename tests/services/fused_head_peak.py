"""Prints the growth of this process's largest resident size, in bytes, over the log-probabilities and entropies of
`fused_head_peak.py TOKENS VOCABULARY` loss tokens and their gradients. The weights are there before.
"""

from __future__ import annotations

import resource
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nouscoder.domain.rollout import Rollout, Sampling, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, FinishReason, VersionSpan, float32, int32
from nouscoder.learner.model.logprobs import score_tokens
from nouscoder.learner.model.packed_attention import PACKED_ATTENTION
from nouscoder.learner.model.packing import pack

TOKENS_OF_ONE = 1024


def policy(vocabulary: int) -> Qwen3ForCausalLM:
    """A small model with a head of this many tokens, and with gradients of zero."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation(PACKED_ATTENTION)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def rollout(number: int, vocabulary: int) -> Rollout:
    """One with TOKENS_OF_ONE loss tokens from the whole vocabulary."""
    tokens = [(number * 7919 + place * 104729) % vocabulary for place in range(TOKENS_OF_ONE)]
    logprobs, versions = float32([-1.0] * TOKENS_OF_ONE), (VersionSpan(0, TOKENS_OF_ONE),)
    completion = Completion(int32(tokens), logprobs, versions, FinishReason.LENGTH)
    return assemble_rollout(Task(f"r{number}", "g", "p", "", Sampling()), [int32([1]), completion], "")


def largest_resident_bytes() -> int:
    """Of this process since its start."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(tokens: int, vocabulary: int) -> None:
    """See the module."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = policy(vocabulary)
    (row,) = pack([rollout(number, vocabulary) for number in range(tokens // TOKENS_OF_ONE)], tokens, model.device)
    assert row.num_tokens == tokens
    before = largest_resident_bytes()
    scores = score_tokens(model, row, entropy_gradient=True)
    torch.autograd.backward((scores.logprobs + scores.entropies).sum())
    print(largest_resident_bytes() - before)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
