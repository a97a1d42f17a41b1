"""Random policies and graded batches for benchmarks and tests, with the form of real ones, from a seed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.rollout import Rollout, Sampling, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, FinishReason, float32, int32, spans_of
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.learner.model.packed_attention import PACKED_ATTENTION

_FIRST_CHARACTER = 3  # ids below are special tokens


def random_policy(seed: int, *, hidden_size: int = 32, num_layers: int = 2, tied: bool = False) -> Qwen3ForCausalLM:
    """A Qwen3 decoder with random weights and the vocabulary of the character tokenizer."""
    config = Qwen3Config(
        vocab_size=CharTokenizer().vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden_size // 2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config)
    policy.set_attn_implementation(PACKED_ATTENTION)
    return policy


def write_policy_folder(folder: Path, policy: PreTrainedModel) -> None:
    """Write the policy and its tokenizer as a folder for `config.policy.path`."""
    policy.save_pretrained(folder)
    CharTokenizer().save(folder)


def random_batch(
    batch_id: int,
    *,
    seed: int,
    num_groups: int = 4,
    group_size: int = 4,
    prompt_tokens: int = 12,
    max_tokens: int = 24,
    policy_version: int = 0,
) -> Batch:
    """Rollouts of random characters and lengths. The previous version sampled half; each group has both rewards."""
    random = Random(f"{seed}/{batch_id}")
    rollouts: list[GradedRollout] = []
    for group in range(num_groups):
        group_id = f"g{batch_id * num_groups + group:06d}"
        prompt = _tokens(random, prompt_tokens)
        for member in range(group_size):
            rollout = _rollout(random, f"{group_id}-{member}", group_id, prompt, max_tokens, policy_version)
            # The first is right and the second wrong, so that no group has zero variance.
            accepted = member == 0 or (member > 1 and random.random() < 0.5)
            rollouts.append(GradedRollout(rollout, _verdict(accepted=accepted), 1.0 if accepted else -1.0))
    return Batch(batch_id, tuple(rollouts), policy_version)


def _tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(_FIRST_CHARACTER, CharTokenizer().vocab_size) for _ in range(count))


def _rollout(
    random: Random, rollout_id: str, group_id: str, prompt: tuple[int, ...], max_tokens: int, policy_version: int
) -> Rollout:
    tokens = _tokens(random, random.randint(2, max_tokens))
    older = len(tokens) // 2 if policy_version else 0
    completion = Completion(
        token_ids=int32(tokens),
        # About the log-probability of one of a hundred characters under an untrained policy.
        logprobs=float32(random.uniform(-5.5, -3.5) for _ in tokens),
        versions=spans_of([policy_version - 1] * older + [policy_version] * (len(tokens) - older)),
        finish_reason=FinishReason.LENGTH if len(tokens) == max_tokens else FinishReason.STOP,
    )
    task = Task(rollout_id, group_id, f"problem-{group_id}", CharTokenizer().decode(prompt), Sampling())
    return assemble_rollout(task, [int32(prompt), completion], CharTokenizer().decode(tokens))


def _verdict(*, accepted: bool) -> Verdict:
    kind = VerdictKind.ACCEPTED if accepted else VerdictKind.WRONG_ANSWER
    return Verdict(kind=kind, passed=int(accepted), total=1, graded=1, duration_s=0.01, backend="synthetic")
