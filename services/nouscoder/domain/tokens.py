"""The tokens of a rollout: those that a policy sampled, with their log-probabilities and policy versions.

Bulk values are memoryviews of int32 (format "i") and float32 (format "f"): one buffer, never one Python object a token.

`ExpertChoices` are the experts that a mixture-of-experts policy chose for the tokens that it read. Generation records
them, and the learner computes with the same experts (router replay, "R3", arXiv 2510.11370), because a small difference
of arithmetic or weights can send a token to other experts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import TypeVar

# The formats of one byte (up to 256 experts) and of two.
_FORMATS = ("B", "H")


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """`ids` [positions, layers, top_k] in one flat array of format "B" or "H", in the order of the router's output.

    Position p belongs to token p of the sequence. Only layers with experts count. Raises ValueError on construction
    when the array has another form.
    """

    ids: memoryview[int]
    num_layers: int
    top_k: int

    def __post_init__(self) -> None:
        size = self.num_layers * self.top_k
        if self.ids.format not in _FORMATS or self.ids.ndim != 1 or size < 1 or len(self.ids) % size:
            raise ValueError(
                f"{len(self.ids)} expert ids of format {self.ids.format} are not {self.num_layers} layers of"
                f" {self.top_k} for each position"
            )

    @property
    def num_positions(self) -> int:
        """Tokens that the policy read."""
        return len(self.ids) // (self.num_layers * self.top_k)

    def between(self, start: int, end: int) -> ExpertChoices:
        """Those of the positions start .. end - 1."""
        size = self.num_layers * self.top_k
        return ExpertChoices(self.ids[start * size : end * size], self.num_layers, self.top_k)

    def last(self, num_positions: int) -> ExpertChoices:
        """Those of the last `num_positions`. Raises ValueError when there are fewer."""
        if num_positions > self.num_positions:
            raise ValueError(f"{self.num_positions} tokens have recorded experts, not {num_positions}")
        return self.between(self.num_positions - num_positions, self.num_positions)


def joined(parts: Sequence[ExpertChoices]) -> ExpertChoices:
    """Choices of consecutive positions as one. Raises ValueError when there are none, or of different policies."""
    kinds = {(part.ids.format, part.num_layers, part.top_k) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"expert choices to be joined have {len(kinds)} forms, not one")
    ((kind, num_layers, top_k),) = kinds
    if len(parts) == 1:
        return parts[0]
    ids = memoryview(b"".join(part.ids for part in parts)).cast(kind)  # type: ignore[call-overload]
    return ExpertChoices(ids, num_layers, top_k)


Number = TypeVar("Number", int, float)

# Rounding in a float32 log-softmax can put a sampled token's log-probability slightly above 0.
_MAX_LOGPROB = 1e-4


class FinishReason(StrEnum):
    """Why a rollout ended. LENGTH makes it overlong."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`num_tokens` consecutive sampled tokens of one policy version."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """`num_tokens` consecutive tokens, all sampled from the policy (they count in the loss) or all given to it."""

    num_tokens: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Consecutive tokens that a policy sampled, at least one.

    token_ids [tokens] int32; logprobs [tokens] float32, of the sampled token before truncation; the spans of `versions`
    sum to [tokens]. Raises ValueError on construction when they disagree, or a log-probability is not a finite
    number <= 0.

    `experts`, when they were recorded, are of the tokens that the policy read for these: all of these but the last, and
    those before them, at least back to the sampled one before.
    """

    token_ids: memoryview[int]
    logprobs: memoryview[float]
    versions: tuple[VersionSpan, ...]
    experts: ExpertChoices | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_sampled("sampled tokens", len(self.token_ids), self.logprobs, self.versions)

    def ended(self, reason: FinishReason) -> Completion:
        """The completion that these tokens are."""
        return Completion(self.token_ids, self.logprobs, self.versions, reason, experts=self.experts)

    def after(self, num_tokens: int) -> SampledTokens:
        """Those after the first `num_tokens`."""
        num_left = len(self.token_ids) - num_tokens
        spans = spans_between(self.versions, num_tokens, len(self.token_ids))
        experts = self.experts.last(num_left) if self.experts is not None and num_tokens else self.experts
        return SampledTokens(self.token_ids[num_tokens:], self.logprobs[num_tokens:], spans, experts=experts)

    @staticmethod
    def concatenated(parts: Sequence[SampledTokens]) -> SampledTokens:
        """Tokens that were sampled one part after the other."""
        return SampledTokens(
            concatenated(part.token_ids for part in parts),
            concatenated(part.logprobs for part in parts),
            merged(span for part in parts for span in part.versions),
            experts=experts_of(parts),
        )


@dataclass(frozen=True, slots=True)
class Completion(SampledTokens):
    """What an engine answers to one prompt: the sampled tokens, and why they ended.

    The `experts` of an engine are of the whole prompt and of all sampled tokens but the last.
    """

    finish_reason: FinishReason


class SegmentedTokens:
    """What follows from the segments and version spans of a rollout, whole or partial."""

    __slots__ = ()
    segments: tuple[Segment, ...]
    token_ids: memoryview[int]
    logprobs: memoryview[float]
    versions: tuple[VersionSpan, ...]

    def check(self, name: str) -> None:
        """Raise ValueError unless segments, tokens, log-probabilities and spans agree."""
        if any(segment.num_tokens < 1 for segment in self.segments):
            raise ValueError(f"{name}: a segment is empty")
        if sum(segment.num_tokens for segment in self.segments) != len(self.token_ids):
            raise ValueError(f"{name}: segments do not cover the {len(self.token_ids)} tokens")
        check_sampled(name, self.num_sampled_tokens, self.logprobs, self.versions)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that count in the loss."""
        return sum(segment.num_tokens for segment in self.segments if segment.is_sampled)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens."""
        return min(span.policy_version for span in self.versions)

    @property
    def newest_version(self) -> int:
        """The newest policy version among the sampled tokens."""
        return max(span.policy_version for span in self.versions)


def experts_of(parts: Sequence[SampledTokens]) -> ExpertChoices | None:
    """The experts of parts of which each begins where the one before ended; None when a part has none."""
    found = [part.experts for part in parts if part.experts is not None]
    return joined(found) if found and len(found) == len(parts) else None


def int32(values: Iterable[int]) -> memoryview[int]:
    """The values as a bulk array of a rollout."""
    return memoryview(array("i", values))


def float32(values: Iterable[float]) -> memoryview[float]:
    """The values as a bulk array of a rollout."""
    return memoryview(array("f", values))


def concatenated(parts: Iterable[memoryview[Number]]) -> memoryview[Number]:
    """Arrays of one format as one array; a single one is not copied. Raises ValueError when there is none."""
    views = list(parts)
    if not views:
        raise ValueError("there is no array to concatenate")
    if len(views) == 1:
        return views[0]
    return memoryview(b"".join(views)).cast(views[0].format)  # type: ignore[call-overload, no-any-return]


def spans_of(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Run-length encode the policy version of each token, `versions` [tokens]."""
    return tuple(VersionSpan(version, sum(1 for _ in run)) for version, run in groupby(versions))


def merged(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The same spans, with neighbours of one version joined."""
    runs = groupby(spans, lambda span: span.policy_version)
    return tuple(VersionSpan(version, sum(span.num_tokens for span in run)) for version, run in runs)


def spans_between(spans: Iterable[VersionSpan], first: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans of the tokens from number `first` up to, but without, number `end`."""
    found, place = [], 0
    for span in spans:
        size = min(place + span.num_tokens, end) - max(place, first)
        if size > 0:
            found.append(VersionSpan(span.policy_version, size))
        place += span.num_tokens
    return tuple(found)


def check_sampled(name: str, num_tokens: int, logprobs: memoryview[float], versions: tuple[VersionSpan, ...]) -> None:
    """Raise ValueError unless the arrays of the sampled tokens agree. `max` and `sum` run in C."""
    if not num_tokens:
        raise ValueError(f"{name} has no sampled tokens")
    if len(logprobs) != num_tokens:
        raise ValueError(f"{name}: {len(logprobs)} log-probabilities for {num_tokens} sampled tokens")
    if any(span.num_tokens < 1 for span in versions):
        raise ValueError(f"{name}: a version span is empty")
    if sum(span.num_tokens for span in versions) != num_tokens:
        raise ValueError(f"{name}: version spans do not cover the {num_tokens} sampled tokens")
    # A NaN or an infinity anywhere makes the sum one; finite float32 values cannot overflow a double.
    if not math.isfinite(sum(logprobs)) or max(logprobs) > _MAX_LOGPROB:
        raise ValueError(f"{name}: a log-probability is not a finite number <= 0")
