"""A rollout: one sampled completion, token by token, with the policy version that sampled each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a rollout ended. LENGTH makes it overlong."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled; NousCoder-14B trains at temperature 1, top-p 1. `seed` 0 lets the engine choose."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """A rollout to be sampled."""

    rollout_id: str
    group_id: str
    problem_id: str
    prompt: str
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`num_tokens` consecutive tokens sampled under `policy_version`."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion.

    prompt_token_ids [prompt_tokens]; token_ids, logprobs (of the sampled token, before truncation) and loss_mask
    [tokens]; the spans of `versions` sum to [tokens]. Raises ValueError on construction when they disagree or a
    log-probability is not a finite number <= 0.
    """

    rollout_id: str
    group_id: str
    problem_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[bool, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    text: str

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if not num_tokens:
            raise ValueError(f"rollout {self.rollout_id} has no tokens")
        if len(self.logprobs) != num_tokens or len(self.loss_mask) != num_tokens:
            raise ValueError(f"rollout {self.rollout_id}: token_ids, logprobs and loss_mask differ in length")
        if any(span.num_tokens < 1 for span in self.versions):
            raise ValueError(f"rollout {self.rollout_id}: a version span is empty")
        if sum(span.num_tokens for span in self.versions) != num_tokens:
            raise ValueError(f"rollout {self.rollout_id}: version spans do not cover the {num_tokens} tokens")
        # Rounding in float32 log-softmax may leave a sampled token a hair above 0.
        if any(not math.isfinite(value) or value > 1e-4 for value in self.logprobs):
            raise ValueError(f"rollout {self.rollout_id}: a log-probability is not a finite number <= 0")

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the tokens."""
        return min(span.policy_version for span in self.versions)

    @property
    def newest_version(self) -> int:
        """The newest policy version among the tokens."""
        return max(span.policy_version for span in self.versions)

    @property
    def is_overlong(self) -> bool:
        """It was cut at max_new_tokens."""
        return self.finish_reason is FinishReason.LENGTH


def spans_of(versions: list[int]) -> tuple[VersionSpan, ...]:
    """Run-length encode the policy version of each token, `versions` [tokens]."""
    spans: list[VersionSpan] = []
    for version in versions:
        if spans and spans[-1].policy_version == version:
            spans[-1] = VersionSpan(version, spans[-1].num_tokens + 1)
        else:
            spans.append(VersionSpan(version, 1))
    return tuple(spans)
