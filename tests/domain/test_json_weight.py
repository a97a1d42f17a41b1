"""The weight of a JSON text is that of its values, wherever it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nouscoder.formats import json_values
from nouscoder.formats.json_values import MAX_WEIGHT, TooManyValues, ValueCount, json_weight

TEXTS = st.text(st.sampled_from('ab",:[]{}\\\n\té\u2028')) | st.text()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)


def weight_of(value: Any) -> int:
    """The definition."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(weight_of, value))
    if isinstance(value, dict):
        return 2 + 9 * len(value) + max(0, len(value) - 1) + sum(map(weight_of, value.values()))
    return 0


@given(VALUES, st.integers(1, 40), st.booleans())
@example(["\\", '"', '\\"', "\\\\", ",[{:"], 1, False)
@example({'a"\\': ["\\\\\\", {'"': "[,"}]}, 2, True)
def test_the_weight_is_that_of_the_values(value: Any, piece_bytes: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_PIECE_BYTES", piece_bytes)
        assert json_weight(text) == json_weight(text.encode("utf8", "surrogatepass")) == weight_of(value)


def test_a_text_that_is_too_heavy_is_not_counted_to_its_end() -> None:
    body = b"1," * (16 << 20)
    assert 1000 < json_weight(body, 1000) < len(body) // 10


def test_a_long_text_weighs_nothing() -> None:
    assert json_weight(b'["' + b'1,{[:\\"' * 1_000_000 + b'"]') == 2


def test_the_texts_of_a_request_count_together() -> None:
    values = ValueCount(MAX_WEIGHT - 3)
    values.add("[1,2]")
    values.add_weight(1)
    with pytest.raises(TooManyValues, match="holds too many values"):
        values.add("[]")


@pytest.mark.parametrize("text", ["", '"', "\\", '\\"', "[" * 9, '"a\\'])
def test_what_is_no_json_has_some_weight(text: str) -> None:
    assert json_weight(text) <= 10
