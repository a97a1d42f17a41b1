"""JSON is read and written by the fast library exactly as by Python's json module and by pydantic."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from nouscoder.domain.submission import Case, MathCase, StdinCase, StdinTests
from nouscoder.formats.body import digest_of
from nouscoder.formats.json_values import case_json, json_value, with_whole_characters

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers() | st.integers(-(2**80), 2**80) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
RUNS = st.builds(StdinCase, TEXTS, TEXTS, st.lists(TEXTS, max_size=2).map(tuple))
CASES: st.SearchStrategy[Case] = RUNS | TEXTS | st.builds(MathCase, TEXTS)


@given(VALUES, st.booleans(), st.booleans())
@example([2**64, -(2**63) - 1, 10**30, 1e30, -0.0, 5e-324], False, True)
@example({"nested": [{"deep": [2**64]}]}, True, False)
def test_a_value_is_that_of_python_s_json_with_its_types(value: Any, in_ascii: bool, as_bytes: bool) -> None:
    text = json.dumps(value, ensure_ascii=in_ascii)
    # repr tells 1 from 1.0 and from True, 0.0 from -0.0, and the order of keys.
    assert repr(json_value(text.encode() if as_bytes else text)) == repr(json.loads(text))


@given(st.text('[]{}":,\\ u0dD8eE+-.19nulltruefalseNaIif\n\x00\u00e9'))
@example('"\\ud800"')
@example("1" * 5000)
@example("1e400")
@example('{"a": 1, "a": 2}')
def test_what_one_library_refuses_is_decided_by_pydantic(text: str) -> None:
    try:
        expected = from_json(text)
    except ValueError as error:
        with pytest.raises(ValueError, match=f"^{re.escape(str(error))}$"):
            json_value(text)
    else:
        assert repr(json_value(text)) == repr(expected)


surrogates = st.text("\ud83d\ude00\udfff\ud800ud83\\\n\u00e9")


@given(surrogates, st.booleans())
@example("\\\ud83d\\ude00\ud83d\\", True)
def test_half_of_a_surrogate_pair_becomes_a_mark_and_all_else_stays(text: str, upper: bool) -> None:
    encoded = json.dumps(text).encode()
    if upper:
        encoded = re.sub(rb"(?<=\\u)[0-9a-f]{4}", lambda found: found.group().upper(), encoded)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert from_json(with_whole_characters(encoded)).lower() == whole.lower()


def test_a_value_that_is_too_deep_is_refused_and_a_deep_one_is_read() -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "1e30" + "]" * depth

    assert json_value(nested(150)) == json.loads(nested(150))
    with pytest.raises(ValueError, match="recursion"):
        json_value(nested(100_000))


def _as_in_digests(case: Case) -> object:
    """A program without arguments has no field of them, as in the digests of earlier versions."""
    return {"input": case.input, "output": case.output} if isinstance(case, StdinCase) and not case.args else case


@given(CASES)
@example(StdinCase("1", "2", ("--fast", "\u00e9")))
@example(StdinCase("".join(map(chr, range(256))), "\u2028\u2029\ufeff\uffff\U0010ffff"))
def test_a_case_of_texts_has_the_bytes_that_pydantic_writes(case: Case) -> None:
    assert case_json(case) == to_json(_as_in_digests(case))


@pytest.mark.parametrize("case", [StdinCase("\ud800", ""), "\udfff", MathCase("a\ud800b")])
def test_a_case_that_is_not_unicode_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        case_json(case)


def test_digests_are_those_of_earlier_versions() -> None:
    """Stores keep tests under these names, so they must never change."""
    tests = StdinTests((StdinCase('1 2\n"\\"\t\x01\x7f/', "\u00e9\U0001f600\r\n"), StdinCase("", "")))
    assert digest_of(tests) == "sha256:04acb9a4bed45587e0c81e1ef92deac0a75b5f75fff5f83bbb4af8af1ed8e67c"
