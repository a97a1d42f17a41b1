"""A task for the policy, and a rollout: the tokens given to a policy and those that it sampled (tokens.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nouscoder.domain.problem import PublicTests
from nouscoder.domain.tokens import (
    Completion,
    ExpertChoices,
    FinishReason,
    Segment,
    SegmentedTokens,
    VersionSpan,
    concatenated,
    joined,
    merged,
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled; NousCoder-14B trains at temperature 1, top-p 1. `seed` 0 lets the engine choose.

    Raises ValueError for a temperature below 0.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError("sampling.temperature must be at least 0")


@dataclass(frozen=True, slots=True)
class Task:
    """A rollout to be sampled, with no weights older than `min_policy_version`.

    `prompt_template` is a text with {prompt} in it that is used in place of the environment's own; empty takes that.
    `starter_code` is what a program must begin with, and `languages` are those in which it may be written.
    `tests_type` is the type of the hidden tests, which prompts depend on: programs for stdin, or functions.
    `public_tests` are those that the policy may see; the tests that decide the reward never come here. Raises
    ValueError without an id, and when it may sample no token.
    """

    rollout_id: str
    group_id: str
    problem_id: str
    prompt: str
    sampling: Sampling
    min_policy_version: int = 0
    prompt_template: str = ""
    public_tests: PublicTests | None = None
    starter_code: str = ""
    languages: tuple[str, ...] = ("python",)
    tests_type: str = "stdin"

    def __post_init__(self) -> None:
        if not self.rollout_id:
            raise ValueError("task.rollout_id is empty")
        if self.sampling.max_new_tokens < 1:
            raise ValueError("sampling.max_new_tokens must be at least 1")


@dataclass(frozen=True, slots=True)
class Rollout(SegmentedTokens):
    """One rollout.

    The first segment is the prompt, given. token_ids [tokens] int32 cover all segments; logprobs [sampled tokens]
    float32 and the spans of `versions` cover the sampled segments, in order. `sampling` is what it was drawn with,
    `text` is what is graded. `experts` cover the tokens before the last sampled one, when they were recorded.
    `own_reward` is that of an agent, in place of the verdict's. Raises ValueError on construction when they disagree,
    nothing was sampled, or a log-probability is not a finite number <= 0.
    """

    rollout_id: str
    group_id: str
    problem_id: str
    segments: tuple[Segment, ...]
    token_ids: memoryview[int]
    logprobs: memoryview[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    sampling: Sampling
    text: str
    experts: ExpertChoices | None = None
    own_reward: float | None = None

    def __post_init__(self) -> None:
        name = f"rollout {self.rollout_id}"
        if not self.segments or self.segments[0].is_sampled:
            raise ValueError(f"{name} has no prompt: its first segment must be given")
        self.check(name)
        _check_reward(name, self.own_reward)
        if self.experts is not None and self.experts.num_positions != self.sampled_ranges()[-1][1] - 1:
            num_positions = self.experts.num_positions
            raise ValueError(f"{name}: {num_positions} recorded tokens are not those before the last sampled one")

    @property
    def prompt_token_ids(self) -> memoryview[int]:
        """The tokens of the first segment, [prompt tokens]."""
        return self.token_ids[: self.segments[0].num_tokens]

    @property
    def sampled_token_ids(self) -> memoryview[int]:
        """The tokens of the sampled segments, [sampled tokens]."""
        return concatenated(self.token_ids[start:end] for start, end in self.sampled_ranges())

    @property
    def num_versions(self) -> int:
        """How many policy versions sampled its tokens."""
        return len({span.policy_version for span in self.versions})

    @property
    def is_overlong(self) -> bool:
        """Whether it was cut at max_new_tokens."""
        return self.finish_reason is FinishReason.LENGTH

    def sampled_ranges(self) -> list[tuple[int, int]]:
        """(start, end) of each sampled segment in `token_ids`, in order."""
        ranges, start = [], 0
        for segment in self.segments:
            if segment.is_sampled:
                ranges.append((start, start + segment.num_tokens))
            start += segment.num_tokens
        return ranges


@dataclass(frozen=True, slots=True)
class RolloutHeader:
    """What the broker knows of a rollout; the rest is in its record, which the broker never decodes.

    The text starts at `text_offset` in the record and has `text_bytes`. A turn is a sampled segment. `has_thinking` is
    that of the text. `own_reward` is decided with the rollout; None: the verdict decides. Raises ValueError without an
    id, when the oldest version is newer than the newest, and for a reward that is not finite.
    """

    rollout_id: str
    group_id: str
    problem_id: str
    num_tokens: int
    num_prompt_tokens: int
    oldest_version: int
    newest_version: int
    finish_reason: FinishReason
    record_bytes: int
    text_offset: int
    text_bytes: int
    num_turns: int
    has_thinking: bool = False
    own_reward: float | None = None

    def __post_init__(self) -> None:
        if not self.rollout_id:
            raise ValueError("header.rollout_id is empty")
        if self.oldest_version > self.newest_version:
            raise ValueError("header.oldest_version is newer than header.newest_version")
        _check_reward("header", self.own_reward)


def _check_reward(name: str, reward: float | None) -> None:
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"{name}: the reward {reward} is not a finite number")


def assemble_rollout(
    task: Task, parts: Sequence[memoryview[int] | Completion], text: str, own_reward: float | None = None
) -> Rollout:
    """A rollout of `task` from its parts in order: token ids that were given, and completions that were sampled.

    It ended as its last completion did. Raises ValueError where `Rollout` does, or when there is no completion.
    """
    completions = [part for part in parts if isinstance(part, Completion)]
    if not completions:
        raise ValueError(f"rollout {task.rollout_id} has no sampled tokens")
    tokens = [part.token_ids if isinstance(part, Completion) else part for part in parts]
    return Rollout(
        rollout_id=task.rollout_id,
        group_id=task.group_id,
        problem_id=task.problem_id,
        segments=tuple(
            Segment(len(ids), isinstance(part, Completion)) for part, ids in zip(parts, tokens, strict=True)
        ),
        token_ids=concatenated(tokens),
        logprobs=concatenated(completion.logprobs for completion in completions),
        versions=merged(span for completion in completions for span in completion.versions),
        finish_reason=completions[-1].finish_reason,
        sampling=task.sampling,
        text=text,
        experts=_experts_of(parts),
        own_reward=own_reward,
    )


def _experts_of(parts: Sequence[memoryview[int] | Completion]) -> ExpertChoices | None:
    """Each token has the experts of the first pass that read it. None when a completion has none.

    A later turn reads all tokens before it again, and newer weights may choose other experts for them; the tokens of an
    earlier turn were sampled with those of the first pass.
    """
    found: list[ExpertChoices] = []
    num_tokens = known = 0
    for part in parts:
        if not isinstance(part, Completion):
            num_tokens += len(part)
            continue
        if part.experts is None:
            return None
        num_tokens += len(part.token_ids)
        found.append(part.experts.last(num_tokens - 1 - known))
        known = num_tokens - 1
    return joined(found)
