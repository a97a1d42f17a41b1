"""Random policies with experts, and batches whose rollouts have recorded some."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.tokens import ExpertChoices
from nouscoder.learner.model.packed_attention import PACKED_ATTENTION
from nouscoder.policy_folder.policy_tensors import routers_of


def random_policy_with_experts(seed: int, *, num_experts: int = 8, top_k: int = 2) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE decoder with random weights: of three layers the second is dense."""
    config = Qwen3MoeConfig(
        vocab_size=CharTokenizer().vocab_size,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        initializer_range=0.1,  # experts that differ
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3MoeForCausalLM(config)
    policy.set_attn_implementation(PACKED_ATTENTION)
    return policy


def with_random_experts(batch: Batch, policy: PreTrainedModel, seed: int) -> Batch:
    """The batch as if generation had recorded random experts of this policy. Its rollouts have one turn."""
    routers: Any = routers_of(policy)
    random, experts, top_k = Random(seed), range(routers[0].num_experts), routers[0].top_k

    def graded(item: GradedRollout) -> GradedRollout:
        chosen = (random.sample(experts, top_k) for _ in range((len(item.rollout.token_ids) - 1) * len(routers)))
        ids = memoryview(array("B", chain.from_iterable(chosen)))
        return replace(item, rollout=replace(item.rollout, experts=ExpertChoices(ids, len(routers), top_k)))

    return replace(batch, rollouts=tuple(map(graded, batch.rollouts)))
