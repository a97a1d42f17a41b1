"""A key that an object of a JSON text has twice is found, wherever the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.domain.test_json_weight import TEXTS, VALUES

from nouscoder.formats import json_values
from nouscoder.formats.json_values import RepeatedKey, ValueCount, json_weight

# Objects as lists of pairs, whose keys are often the same, also where they are escaped in other ways.
KEYS = st.sampled_from(["a", "b", "", '"', "\\", '\\"', "é", "a:{", "}", "\ud800"])
OBJECTS = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(st.tuples(KEYS | TEXTS, inner, st.booleans()), max_size=4).map(tuple)
    ),
    max_leaves=12,
)


def written(value: Any) -> str:
    """The JSON text of a value in which tuples are objects."""
    if isinstance(value, tuple):
        return "{" + ", ".join(f"{key_text(key, hard)} : {written(one)}" for key, one, hard in value) + "}"
    return "[" + ",".join(map(written, value)) + "]" if isinstance(value, list) else json.dumps(value)


def key_text(key: str, escaped: bool) -> str:
    utf16 = key.encode("utf-16-be", "surrogatepass").hex()
    pairs = (utf16[at : at + 4] for at in range(0, len(utf16), 4))
    return '"' + "".join(f"\\u{pair}" for pair in pairs) + '"' if escaped else json.dumps(key, ensure_ascii=False)


def repeats(pairs: list[tuple[str, Any]]) -> Any:
    """The hook of Python's decoder: raises ValueError for a key that is there twice."""
    if len({key.encode("utf8", "replace") for key, _ in pairs}) < len(pairs):
        raise ValueError
    return dict(pairs)


@given(OBJECTS, st.integers(1, 40))
@example((("a", 1, False), ("b", (("a", 1, False),), False), ("a", 2, True)), 3)
@example([(("a", ["a", "a"], False),), (("a", "a", False),)], 1)
@example((('"', 1, False), ("\\", 1, False), ('"', 1, True)), 2)
def test_exactly_the_texts_with_a_key_twice_are_refused(value: Any, piece_bytes: int) -> None:
    text = written(value)
    try:
        json.loads(text, object_pairs_hook=repeats)
        is_unique = True
    except ValueError:
        is_unique = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_PIECE_BYTES", piece_bytes)
        if is_unique:
            json_weight(text)
        else:
            with pytest.raises(RepeatedKey, match="is given twice in one JSON object"):
                json_weight(text)


def parts_of(text: str) -> Iterator[str]:
    return (text[:end] for end in range(len(text)))


@pytest.mark.parametrize(
    "text", ["}}{", '{"a"1:"a"', '"a":"a":', '{"a\\":1}', ':":":', '{"\\x":1,"\\x":1', '{"a":1}}{"a"']
)
def test_what_is_no_json_is_left_to_its_decoder(text: str) -> None:
    for part in parts_of(text):
        try:
            json_weight(part)
        except RepeatedKey:
            with pytest.raises(json.JSONDecodeError):
                json.loads(part)


def test_a_text_inside_a_body_is_searched_too_and_the_key_is_named() -> None:
    with pytest.raises(RepeatedKey, match="'input' is given twice") as caught:
        ValueCount().add('[{"input": "1", "output": "2", "input": "3"}]')
    assert caught.value.key == "input"
