"""A rollout record decodes to its rollout or raises RecordError, never to a wrong rollout."""

from __future__ import annotations

import struct
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.rollout import (
    Completion,
    FinishReason,
    Rollout,
    Sampling,
    Task,
    assemble_rollout,
    float32,
    int32,
    spans_of,
)
from nouscoder.store.rollout_record import RecordError, decode_rollout, decode_text, encode_rollout

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
    task = Task(draw(name), draw(name), draw(name), "", sampling)
    later = st.tuples(given_tokens, completions())
    parts: list[memoryview[int] | Completion] = [draw(given_tokens), draw(completions())]
    for pair in draw(st.lists(later, max_size=3)):
        parts += pair
    return assemble_rollout(task, parts, draw(st.text() | st.text(max_size=3).map(lambda text: 400 * text)))


@given(rollouts())
def test_a_record_decodes_to_its_rollout_and_its_header(rollout: Rollout) -> None:
    header, record = encode_rollout(rollout)
    assert decode_rollout(record) == rollout
    assert (header.record_bytes, header.num_tokens) == (len(record), len(rollout.token_ids))
    assert header.num_prompt_tokens == len(rollout.prompt_token_ids)
    assert (header.oldest_version, header.newest_version) == (rollout.oldest_version, rollout.newest_version)
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
    for array, kind, offset in ((read.token_ids, np.int32, 104), (read.logprobs, np.float32, [*sizes][-1])):
        values = np.frombuffer(array.cast("B"), kind)
        assert np.shares_memory(values, whole), "no copy"
        assert values.__array_interface__["data"][0] - whole.__array_interface__["data"][0] == offset
        assert offset % 8 == 0


def test_another_version_of_the_layout_is_named() -> None:
    completion = Completion(int32([1]), float32([-0.5]), spans_of([0]), FinishReason.STOP)
    _, record = encode_rollout(assemble_rollout(Task("r", "g", "p", "", Sampling()), [int32([1]), completion], ""))
    with pytest.raises(RecordError, match="layout version 9; this program reads version 1"):
        decode_rollout(record[:4] + struct.pack("<H", 9) + record[6:])
