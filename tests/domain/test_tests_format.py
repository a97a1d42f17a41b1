"""The JSON form of tests: it is read as it was written, and its digest is that of its bytes."""

from __future__ import annotations

import hashlib
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    InteractiveTests,
    JsonValue,
    JudgeProgram,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
    Tests,
)
from nouscoder.formats import body as formats
from nouscoder.formats.body import canonical_json, canonical_parts, digest_of

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
filled = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def some(case: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    """One to four cases."""
    return st.lists(case, min_size=1, max_size=4).map(tuple)


plain = st.builds(StdinCase, texts, texts)
programs = st.builds(JudgeProgram, filled, st.sampled_from(["cpp", "c", "python"]))
calls = st.builds(CallCase, st.lists(values, max_size=3).map(tuple), st.dictionaries(texts, values, max_size=2), values)
all_tests = st.one_of(
    st.builds(StdinTests, some(plain)),
    st.builds(CallTests, filled, some(calls)),
    st.builds(AssertTests, some(texts), texts, st.sampled_from(["", "solution"])),
    st.builds(CheckerTests, some(plain), programs),
    st.builds(InteractiveTests, some(plain), programs, st.booleans(), st.none() | programs),
    st.builds(MathTests, some(st.builds(MathCase, filled))),
)


@given(all_tests)
def test_tests_survive_their_json_form(tests: Tests) -> None:
    data = canonical_json(tests)
    assert formats.tests_from_json(data) == tests
    assert canonical_json(formats.tests_from_json(data)) == data
    assert digest_of(tests) == f"sha256:{hashlib.sha256(data).hexdigest()}"


@given(all_tests)
def test_the_parts_between_head_and_end_are_one_case_each(tests: Tests) -> None:
    head, *cases, end = canonical_parts(tests)
    assert head.endswith(b'"cases":[')
    assert end == b"]}"
    assert json.loads(b"[" + b"".join(cases) + b"]") == json.loads(canonical_json(tests))["cases"]
    assert [case.startswith(b",") for case in cases] == [False] + [True] * (len(cases) - 1)


def test_the_order_of_keys_that_a_program_can_see_is_part_of_the_content() -> None:
    values: list[dict[str, JsonValue]] = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    one, other = (CallTests("f", (CallCase((value,)),)) for value in values)
    assert digest_of(one) != digest_of(other)


def test_numbers_that_only_python_s_json_knows_are_kept() -> None:
    tests = CallTests("f", (CallCase((math.inf, -math.inf), expected=1),))
    assert formats.tests_from_json(canonical_json(tests)) == tests
