"""Pieces of a rollout in progress: however a rollout is cut, the joined pieces are its beginning."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.partial import Part, PartialRollout, joined, num_tokens, tokens_from
from nouscoder.domain.tokens import ExpertChoices, SampledTokens, float32, int32, spans_of
from nouscoder.store.pieces import decode_pieces, encode_piece
from nouscoder.store.record_layout import RecordError


@st.composite
def rollouts(draw: st.DrawFn) -> list[Part]:
    """A prompt, a sampled segment, and any segments after them; the versions never fall."""
    version = end = num_read = 0
    has_experts = draw(st.booleans())
    parts: list[Part] = []
    for is_sampled in [False, True, *draw(st.lists(st.booleans(), max_size=5))]:
        token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8))
        end += len(token_ids)
        if not is_sampled:
            parts.append(int32(token_ids))
            continue
        steps = draw(st.lists(st.integers(0, 2), min_size=len(token_ids), max_size=len(token_ids)))
        versions = [version := version + step for step in steps]
        logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(token_ids), max_size=len(token_ids)))
        experts = experts_between(num_read, end - 1) if has_experts else None
        num_read = end - 1
        parts.append(SampledTokens(int32(token_ids), float32(logprobs), spans_of(versions), experts=experts))
    return parts


def experts_between(start: int, end: int) -> ExpertChoices:
    """Of two layers: the number of the token, and the same plus 1000."""
    ids = [number for place in range(start, end) for number in (place, place + 1000)]
    return ExpertChoices(memoryview(array("H", ids)), 2, 1)


def cut_at(parts: Sequence[Part], ends: Sequence[int]) -> list[PartialRollout]:
    """The pieces that a worker sends which knows the tokens up to each of these ends in turn."""
    whole = tokens_from(parts, 0)
    pieces: list[PartialRollout] = []
    first = 0
    for end in sorted({*ends, whole.end_token}):
        known: list[Part] = []
        place = 0
        for part in parts:
            size = min(num_tokens(part), end - place)
            if size > 0:
                known.append(up_to(part, size))
            place += num_tokens(part)
        try:
            piece = tokens_from(known, first)
        except ValueError:
            continue  # no sampled token yet: the worker waits for one
        pieces.append(piece)
        first = piece.end_token
    return pieces


def up_to(part: Part, size: int) -> Part:
    if not isinstance(part, SampledTokens):
        return part[:size]
    versions = [span.policy_version for span in part.versions for _ in range(span.num_tokens)]
    experts = part.experts
    if experts is not None:
        experts = experts.between(0, experts.num_positions - (len(part.token_ids) - size))
    return SampledTokens(part.token_ids[:size], part.logprobs[:size], spans_of(versions[:size]), experts=experts)


@given(rollouts(), st.lists(st.integers(1, 60), max_size=8))
def test_pieces_cut_anywhere_join_to_the_same_rollout(parts: list[Part], ends: list[int]) -> None:
    pieces = cut_at(parts, ends)
    last = pieces[-1].end_token
    whole = joined(pieces)
    assert (whole.first_token, whole.continues, whole.end_token) == (0, False, last)
    wanted = tokens_from(parts, 0)
    if last == wanted.end_token:
        assert whole == wanted
        assert whole.parts() == parts
    assert list(whole.token_ids) == list(wanted.token_ids)[:last]


@given(rollouts(), st.lists(st.integers(1, 60), max_size=8))
def test_bytes_of_pieces_one_after_another_are_read_as_the_same_rollout(parts: list[Part], ends: list[int]) -> None:
    pieces = cut_at(parts, ends)
    assert decode_pieces(b"".join(encode_piece(piece) for piece in pieces)) == joined(pieces)


@given(rollouts(), st.data())
def test_damaged_or_missing_bytes_are_noticed(parts: list[Part], data: st.DataObject) -> None:
    encoded = encode_piece(tokens_from(parts, 0))
    cut = data.draw(st.integers(1, len(encoded) - 1))
    with pytest.raises(RecordError):
        decode_pieces(encoded[:cut])
    place, bit = data.draw(st.integers(0, len(encoded) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(encoded)
    damaged[place] ^= 1 << bit
    with pytest.raises(RecordError):
        decode_pieces(bytes(damaged))


def sampled(*token_ids: int) -> SampledTokens:
    return SampledTokens(int32(token_ids), float32([-1.0] * len(token_ids)), spans_of([3] * len(token_ids)))


def test_a_piece_that_does_not_follow_the_one_before_is_refused() -> None:
    parts: list[Part] = [int32([1, 2]), sampled(5, 6), int32([7]), sampled(8, 9)]
    begin, rest = tokens_from(parts[:2], 0), tokens_from(parts, 4)
    assert joined([begin, rest]).parts() == parts
    with pytest.raises(ValueError, match="does not follow token 0"):
        joined([rest])
    with pytest.raises(ValueError, match="does not follow token 4"):
        joined([begin, begin])
    with pytest.raises(ValueError, match="continues no segment before it"):
        joined([PartialRollout.rest_of_turn(0, sampled(5))])


def test_two_turns_without_given_tokens_between_them_stay_two_turns() -> None:
    parts: list[Part] = [int32([1]), sampled(5, 6), sampled(7, 8)]
    first, second = tokens_from(parts[:2], 0), tokens_from(parts, 3)
    assert (second.continues, joined([first, second]).parts()) == (False, parts)
    assert tokens_from(parts, 2).continues


def test_a_piece_whose_experts_are_not_those_of_its_tokens_is_refused() -> None:
    parts: list[Part] = [int32([1, 2]), sampled(5, 6), int32([7]), sampled(8, 9)]
    bare = tokens_from(parts, 0)
    assert replace(bare, experts=experts_between(0, 6)).experts is not None
    for num_positions in (5, 7):
        with pytest.raises(ValueError, match=f"{num_positions} tokens have recorded experts, not 6"):
            replace(bare, experts=experts_between(0, num_positions))
    with pytest.raises(ValueError, match="1 tokens have recorded experts, not 2"):
        replace(PartialRollout.rest_of_turn(4, sampled(5, 6)), experts=experts_between(0, 1))
