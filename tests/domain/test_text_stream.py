"""The text of tokens that come one after another: the invariant of text_stream.py, with tokens that are bytes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from nouscoder.generation.openai.sampling import TextStream

SHORT = st.text("ab\u00e9\u4f60\U0001f600", min_size=1, max_size=4)


def decode(ids: Sequence[int]) -> str:
    """Each token is one byte of UTF-8, so a character has up to four tokens."""
    return bytes(ids).decode("utf8", "replace")


@given(st.text(max_size=40))
def test_the_texts_joined_are_the_text_of_all_tokens(text: str) -> None:
    whole = text.encode("utf8", "replace")
    stream = TextStream(decode)
    parts = [stream.add(token) for token in whole]
    assert "".join([*parts, stream.end()]) == whole.decode()
    assert "\ufffd" not in "".join(parts) or "\ufffd" in whole.decode()


@given(st.text("ab\u00e9\u4f60\U0001f600", max_size=40), SHORT)
def test_a_stop_string_ends_the_text_before_it(text: str, stop: str) -> None:
    stream = TextStream(decode, [stop])
    parts = []
    for token in text.encode():
        parts.append(stream.add(token))
        if stream.stopped:
            break
    before, found, _ = text.partition(stop)
    assert stream.stopped == bool(found)
    assert "".join([*parts, stream.end()]) == before


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), min_size=2, max_size=3))
def test_of_several_stop_strings_the_one_that_is_complete_first_ends_it(text: str, stops: list[str]) -> None:
    stream = TextStream(decode, stops)
    parts = []
    for token in text.encode():
        parts.append(stream.add(token))
        if stream.stopped:
            break
    ends = {place + len(stop): place for stop in stops if (place := text.find(stop)) >= 0}
    complete = min(ends, default=None)
    wanted = text if complete is None else text[: min(text.find(s) for s in stops if s in text[:complete])]
    assert "".join([*parts, stream.end()]) == wanted


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    stream = TextStream(decode, ["END"])
    assert [stream.add(token) for token in b"a EN e"] == ["a", " ", "", "", "EN ", "e"]
    assert [stream.add(token) for token in "\u00e9".encode()] == ["", "\u00e9"]
    assert stream.add(0xE9) == ""  # perhaps a character
    assert stream.end() == "\ufffd"
