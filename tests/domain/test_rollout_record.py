"""A rollout record decodes to its rollout or raises RecordError, never to a wrong rollout."""

from __future__ import annotations

import hashlib
import struct
from array import array
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.rollout import Rollout, Sampling, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, ExpertChoices, FinishReason, float32, int32, joined, spans_of
from nouscoder.store.record_layout import RecordError
from nouscoder.store.rollout_record import decode_rollout, decode_text, encode_rollout

# Of `dense_rollout`, by the program before records could have experts.
BYTES_OF_VERSION_1, DIGEST_OF_VERSION_1 = 200, "00c92dde3d5b1dbacbdc7577ba79a20db2f6b3ee3be1c479cc2b93dc7361d92a"

token = st.integers(0, 2**31 - 1)
given_tokens = st.lists(token, min_size=1, max_size=20).map(int32)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(st.lists(token, min_size=1, max_size=40))
    logprobs = draw(st.lists(st.floats(-(2.0**100), 0, width=32), min_size=len(ids), max_size=len(ids)))
    versions = draw(st.lists(st.integers(0, 2**40), min_size=len(ids), max_size=len(ids)))
    return Completion(int32(ids), float32(logprobs), spans_of(sorted(versions)), draw(st.sampled_from(FinishReason)))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    sampling = Sampling(
        draw(st.floats(0, 4)), draw(st.floats(0.01, 1)), draw(st.integers(1, 2**31)), draw(st.integers(0, 2**64 - 1))
    )
    name = st.text(max_size=20)
    task = Task(draw(st.text(min_size=1, max_size=20)), draw(name), draw(name), "", sampling)
    later = st.tuples(given_tokens, completions())
    parts: list[memoryview[int] | Completion] = [draw(given_tokens), draw(completions())]
    for pair in draw(st.lists(later, max_size=3)):
        parts += pair
    if draw(st.booleans()):
        parts = with_experts(parts, draw(st.sampled_from("BH")), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    own_reward = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
    text = draw(st.text() | st.text(max_size=3).map(lambda text: 400 * text))
    return assemble_rollout(task, parts, text, own_reward)


def with_experts(
    parts: list[memoryview[int] | Completion], kind: str, num_layers: int, top_k: int
) -> list[memoryview[int] | Completion]:
    """The parts as if each completion had read all tokens before it. Ids count up through all of them."""
    done: list[memoryview[int] | Completion] = []
    num_tokens = 0
    for part in parts:
        num_tokens += len(part.token_ids if isinstance(part, Completion) else part)
        if isinstance(part, Completion):
            ids = array(kind, (place % 251 for place in range((num_tokens - 1) * num_layers * top_k)))
            part = replace(part, experts=ExpertChoices(memoryview(ids), num_layers, top_k))
        done.append(part)
    return done


@given(rollouts())
def test_a_record_decodes_to_its_rollout_and_its_header(rollout: Rollout) -> None:
    header, record = encode_rollout(rollout)
    assert decode_rollout(record) == rollout
    assert (header.record_bytes, header.num_tokens) == (len(record), len(rollout.token_ids))
    assert header.num_prompt_tokens == len(rollout.prompt_token_ids)
    assert (header.oldest_version, header.newest_version) == (rollout.oldest_version, rollout.newest_version)
    assert header.own_reward == rollout.own_reward
    assert decode_text(record[header.text_offset :][: header.text_bytes]) == rollout.text
    assert encode_rollout(decode_rollout(record)) == (header, record)


@given(rollouts(), st.data())
def test_a_flipped_bit_raises(rollout: Rollout, data: st.DataObject) -> None:
    header, record = encode_rollout(rollout)
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    damaged = bytearray(record)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        decode_rollout(bytes(damaged))
    text = bytearray(record[header.text_offset :][: header.text_bytes])
    text[bit % len(text)] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        decode_text(bytes(text))


@given(rollouts(), st.data())
def test_a_record_with_missing_or_extra_bytes_raises(rollout: Rollout, data: st.DataObject) -> None:
    header, record = encode_rollout(rollout)
    cut = data.draw(st.integers(0, len(record) - 1))
    for wrong in (record[:cut], record + bytes(cut + 1)):
        with pytest.raises(RecordError):
            decode_rollout(wrong)
    text = record[header.text_offset :][: header.text_bytes]
    with pytest.raises(RecordError):
        decode_text(text[: cut % len(text)])


@given(st.binary(max_size=300), st.booleans())
def test_other_bytes_raise_record_error(junk: bytes, with_magic: bool) -> None:
    with pytest.raises(RecordError):
        decode_rollout(b"NCRR\x01\x00" + junk if with_magic else junk)


def test_a_record_is_read_in_place_and_its_sections_are_aligned() -> None:
    size = 32_000
    completion = Completion(int32(range(size)), float32([-0.5] * size), spans_of([7] * size), FinishReason.STOP)
    rollout = assemble_rollout(Task("r", "g", "p", "", Sampling()), [int32([1, 2, 3]), completion], "x = 1\n" * size)
    _, record = encode_rollout(rollout)
    assert len(record) < 8 * size + 2000, "the text is compressed, spans are run-length encoded"
    read = decode_rollout(record)
    whole = np.frombuffer(record, np.uint8)
    sizes = accumulate([72, 8 * 2, 16 * 1, 4 * (size + 3) + 4])
    for view, kind, offset in ((read.token_ids, np.int32, 104), (read.logprobs, np.float32, [*sizes][-1])):
        values = np.frombuffer(view.cast("B"), kind)
        assert np.shares_memory(values, whole), "no copy"
        assert values.__array_interface__["data"][0] - whole.__array_interface__["data"][0] == offset
        assert offset % 8 == 0


def test_another_version_of_the_layout_is_named() -> None:
    completion = Completion(int32([1]), float32([-0.5]), spans_of([0]), FinishReason.STOP)
    _, record = encode_rollout(assemble_rollout(Task("r", "g", "p", "", Sampling()), [int32([1]), completion], ""))
    with pytest.raises(RecordError, match="layout version 9; this program reads versions 1 and 2"):
        decode_rollout(record[:4] + struct.pack("<H", 9) + record[6:])


def dense_rollout() -> Rollout:
    completion = Completion(int32([4, 5, 6]), float32([-0.5, -1.0, -0.25]), spans_of([2, 2, 3]), FinishReason.STOP)
    return assemble_rollout(Task("r", "g", "p", "", Sampling(seed=7)), [int32([1, 2]), completion], "print(1)")


def test_the_record_of_a_policy_without_experts_is_that_of_version_1_byte_for_byte() -> None:
    _, record = encode_rollout(dense_rollout())
    assert struct.unpack_from("<HBB", record, 4) == (1, 1, 0)
    assert (len(record), hashlib.sha256(record).hexdigest()) == (BYTES_OF_VERSION_1, DIGEST_OF_VERSION_1)


def test_the_experts_add_a_section_of_their_size() -> None:
    dense = dense_rollout()
    ids = memoryview(array("B", range(4 * 3 * 2)))
    rollout = replace(dense, experts=ExpertChoices(ids, num_layers=3, top_k=2))
    (_, without), (_, record) = encode_rollout(dense), encode_rollout(rollout)
    assert struct.unpack_from("<HBB", record, 4) == (2, 1, 1)
    assert len(record) == len(without) + 8 + 24
    read = decode_rollout(record)
    assert read == rollout
    assert read.experts is not None
    assert np.shares_memory(np.frombuffer(read.experts.ids, np.uint8), np.frombuffer(record, np.uint8)), "no copy"


def test_experts_must_be_those_of_the_tokens_before_the_last_sampled_one() -> None:
    ids = memoryview(array("B", range(5 * 3 * 2)))
    with pytest.raises(ValueError, match="rollout r: 5 recorded tokens are not those before the last sampled one"):
        replace(dense_rollout(), experts=ExpertChoices(ids, num_layers=3, top_k=2))
    with pytest.raises(ValueError, match="30 expert ids of format B are not 4 layers of 2 for each position"):
        ExpertChoices(ids, num_layers=4, top_k=2)
    with pytest.raises(ValueError, match="have 2 forms, not one"):
        joined([ExpertChoices(ids, 3, 2), ExpertChoices(ids, 2, 3)])


def test_each_token_has_the_experts_of_the_first_turn_that_read_it() -> None:
    def turn(tokens: list[int], read: list[int]) -> Completion:
        experts = ExpertChoices(memoryview(array("B", read)), 1, 1)
        logprobs = float32([-1.0] * len(tokens))
        return Completion(int32(tokens), logprobs, spans_of([0] * len(tokens)), FinishReason.STOP, experts=experts)

    later = turn([4, 4], [20, 21, 22, 23, 24, 25, 26])
    parts: list[memoryview[int] | Completion] = [int32([1, 1]), turn([2, 2, 2], [10, 11, 12, 13]), int32([3]), later]
    rollout = assemble_rollout(Task("r", "g", "p", "", Sampling()), [*parts, int32([5])], "")
    assert rollout.experts is not None
    assert list(rollout.experts.ids) == [10, 11, 12, 13, 24, 25, 26]
    parts[3] = replace(later, experts=None)
    assert assemble_rollout(Task("r", "g", "p", "", Sampling()), parts, "").experts is None
