"""Parts of a rollout that is being sampled, so that another worker can continue it.

The worker that samples a long rollout sends its tokens in pieces. Joined in order, the pieces are the beginning of the
rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Self, TypeAlias

from nouscoder.domain.tokens import (
    ExpertChoices,
    SampledTokens,
    Segment,
    SegmentedTokens,
    VersionSpan,
    concatenated,
    experts_of,
    merged,
    spans_between,
)

# The tokens of one segment: given to the policy [tokens] int32, or sampled from it. A sampled part has the experts of
# the tokens that no part before it has.
Part: TypeAlias = "memoryview[int] | SampledTokens"


@dataclass(frozen=True, slots=True)
class PartialRollout(SegmentedTokens):
    """The tokens of a rollout from number `first_token` on, as many as were known.

    As in a Rollout, token_ids [tokens] int32 cover all segments; logprobs [sampled tokens] float32 and the spans of
    `versions` cover the sampled segments. `continues`: the first segment is the rest of the one before `first_token`.
    `experts`, when they were recorded, are of the tokens before the last sampled one that no earlier piece has. Raises
    ValueError on construction when they disagree or nothing was sampled.
    """

    first_token: int
    continues: bool
    segments: tuple[Segment, ...]
    token_ids: memoryview[int]
    logprobs: memoryview[float]
    versions: tuple[VersionSpan, ...]
    experts: ExpertChoices | None = None

    def __post_init__(self) -> None:
        self.check("partial rollout")
        if self.experts is not None:
            # The last sampled token before this piece was read for it, and maybe given ones after that.
            fewest = self._read_end + (self.first_token > 0)
            num_positions = self.experts.num_positions
            if num_positions < fewest or (not self.first_token and num_positions > fewest):
                raise ValueError(f"partial rollout: {num_positions} tokens have recorded experts, not {fewest}")

    @classmethod
    def rest_of_turn(cls, first_token: int, sampled: SampledTokens) -> Self:
        """Tokens that go on with a sampled segment from number `first_token` on."""
        segments = (Segment(len(sampled.token_ids), is_sampled=True),)
        return cls(first_token, True, segments, sampled.token_ids, sampled.logprobs, sampled.versions, sampled.experts)

    @property
    def end_token(self) -> int:
        """The number of the token after the last."""
        return self.first_token + len(self.token_ids)

    @property
    def _read_end(self) -> int:
        """The place of the last sampled token in `token_ids`: those before it were read."""
        given_last = list(takewhile(lambda segment: not segment.is_sampled, reversed(self.segments)))
        return len(self.token_ids) - sum(segment.num_tokens for segment in given_last) - 1

    def parts(self) -> list[Part]:
        """The tokens, segment by segment."""
        parts: list[Part] = []
        place = sampled = num_read = 0
        before = 0 if self.experts is None else self.experts.num_positions - self._read_end
        for segment in self.segments:
            token_ids = self.token_ids[place : place + segment.num_tokens]
            place += segment.num_tokens
            if not segment.is_sampled:
                parts.append(token_ids)
                continue
            end = sampled + segment.num_tokens
            spans = spans_between(self.versions, sampled, end)
            read_end = before + place - 1
            experts = None if self.experts is None else self.experts.between(num_read, read_end)
            parts.append(SampledTokens(token_ids, self.logprobs[sampled:end], spans, experts=experts))
            sampled, num_read = end, read_end
        return parts


def tokens_from(parts: Sequence[Part], first_token: int) -> PartialRollout:
    """The tokens from number `first_token` on of a rollout whose first segments are `parts`.

    Raises ValueError when no sampled token is among them.
    """
    taken: list[Part] = []
    place, continues = 0, False
    for part in parts:
        size = num_tokens(part)
        skipped = min(max(0, first_token - place), size)
        if skipped < size:
            continues = continues or skipped > 0
            taken.append(_without_first(part, skipped))
        place += size
    sampled = [part for part in taken if isinstance(part, SampledTokens)]
    if not sampled:
        raise ValueError(f"no token was sampled from number {first_token} on")
    return PartialRollout(
        first_token=first_token,
        continues=continues,
        segments=tuple(Segment(num_tokens(part), isinstance(part, SampledTokens)) for part in taken),
        token_ids=concatenated(_token_ids(part) for part in taken),
        logprobs=concatenated(part.logprobs for part in sampled),
        versions=merged(span for part in sampled for span in part.versions),
        experts=experts_of(sampled),
    )


def joined(pieces: Iterable[PartialRollout]) -> PartialRollout:
    """Consecutive pieces as one, from token 0 on. Raises ValueError unless each follows the one before."""
    segments: list[list[Part]] = []
    end = 0
    for piece in pieces:
        if piece.first_token != end:
            raise ValueError(
                f"partial rollout: the piece from token {piece.first_token} on does not follow token {end}"
            )
        first, *others = piece.parts()
        if not piece.continues:
            segments.append([first])
        elif segments and isinstance(segments[-1][0], SampledTokens) == isinstance(first, SampledTokens):
            segments[-1].append(first)
        else:
            raise ValueError(f"partial rollout: the piece from token {end} on continues no segment before it")
        segments += [[part] for part in others]
        end = piece.end_token
    return tokens_from([_concatenated(parts) for parts in segments], 0)


def num_tokens(part: Part) -> int:
    """The number of tokens of a part."""
    return len(_token_ids(part))


def _token_ids(part: Part) -> memoryview[int]:
    return part.token_ids if isinstance(part, SampledTokens) else part


def _without_first(part: Part, skipped: int) -> Part:
    if not skipped:
        return part
    return part.after(skipped) if isinstance(part, SampledTokens) else part[skipped:]


def _concatenated(parts: Sequence[Part]) -> Part:
    """Parts of one segment as one."""
    sampled = [part for part in parts if isinstance(part, SampledTokens)]
    return SampledTokens.concatenated(sampled) if sampled else concatenated(_token_ids(part) for part in parts)


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """A piece of a rollout under its lease, as bytes (store/pieces.py), and what the broker must know of it."""

    lease_id: str
    first_token: int
    end_token: int
    oldest_version: int
    newest_version: int
    data: bytes
