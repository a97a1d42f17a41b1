"""Policies with the shapes of real ones and random weights, and batches whose rollouts have given lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.rollout import Sampling, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, FinishReason, float32, int32, spans_of
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.learner.model.computation import round_weights

# Layers, hidden size, MLP, heads, key heads, head size, vocabulary; embedding and head are one matrix.
Shape = tuple[int, int, int, int, int, int, int]
SHAPES: dict[str, Shape] = {
    "tiny": (2, 32, 64, 2, 1, 16, 128),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936),
}


def shaped_policy(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A Qwen3 policy of this shape with random weights from a fixed seed, made on the device that it is used on."""
    layers, hidden, inner, heads, key_heads, head_size, vocabulary = shape
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


_PROMPT_SHARE = 16
_LONGEST_PROMPT = 512


def shaped_batch(vocabulary: int, inputs: Sequence[int]) -> Batch:
    """One group, whose rollouts have these numbers of input tokens; every second one is right.

    A prompt is a sixteenth of its rollout, at most 512 tokens. The recorded log-probabilities are those of a policy
    that knows nothing.
    """
    random = np.random.default_rng(0)
    graded = []
    for number, length in enumerate(inputs):
        num_prompt = min(max(1, length // _PROMPT_SHARE), _LONGEST_PROMPT)
        # The last token is no input.
        tokens = random.integers(0, vocabulary, length + 1).tolist()
        num_sampled = length + 1 - num_prompt
        completion = Completion(
            token_ids=int32(tokens[num_prompt:]),
            logprobs=float32([-float(np.log(vocabulary))] * num_sampled),
            versions=spans_of([0] * num_sampled),
            finish_reason=FinishReason.STOP,
        )
        task = Task(f"r{number}", "g000000", "problem", "", Sampling())
        rollout = assemble_rollout(task, [int32(tokens[:num_prompt]), completion], "")
        kind = VerdictKind.WRONG_ANSWER if number % 2 else VerdictKind.ACCEPTED
        passed = 1 - number % 2
        verdict = Verdict(kind=kind, passed=passed, total=1, graded=1, duration_s=0.01, backend="synthetic")
        graded.append(GradedRollout(rollout, verdict, 1.0 if passed else -1.0))
    return Batch(0, tuple(graded), 0)
