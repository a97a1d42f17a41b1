"""Comparison of outputs and values: truth tables, and bounds on the cost of hostile output."""

from __future__ import annotations

import gc
import json
import math
import threading
import tracemalloc
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.domain.submission import Comparator, ComparatorKind
from nouscoder.formats.json_values import without_collections
from nouscoder.verifier.judges import comparators
from nouscoder.verifier.judges.comparators import HugeInt, UnreadableResult, parse_result, same_text, same_value

TOKENS = Comparator()
LINES = Comparator(ComparatorKind.LINES)
UNORDERED = Comparator(ComparatorKind.UNORDERED_LINES)
EXACT = Comparator(ComparatorKind.EXACT)
CLOSE = Comparator(ComparatorKind.TOKENS, 1e-6)
ANY_CASE = Comparator(ignore_case=True)
KATTIS = Comparator(ComparatorKind.KATTIS, relative_tolerance=0.1)
NINES = "9" * 5000
KATTIS_ABSOLUTE = Comparator(ComparatorKind.KATTIS, absolute_tolerance=1)


@pytest.mark.parametrize(
    ("comparator", "expected", "actual", "same"),
    [
        (EXACT, "1\n", b"1\n", True),
        (EXACT, "1\n", b"1", False),
        (EXACT, "é", "é".encode(), True),
        (LINES, "a b\nc\n", b"a b  \nc", True),
        (LINES, "a b\nc\n", b"a b\r\nc\r\n\n\n", True),
        (LINES, "a b\n", b"a  b\n", False),
        (LINES, "a\n", b" a\n", False),
        (LINES, "a\n\nb", b"a\nb", False),
        (LINES, "", b"\n\n", True),
        (LINES, "a", b"a\nb", False),
        (TOKENS, "1 2\n3\n", b"1  2 3", True),
        (TOKENS, "1 2 3", b"1\n2\n3\n" + b" " * 10_000_000, True),
        (TOKENS, "1 2 3", b"1 2", False),
        (TOKENS, "1 2", b"1 2 3", False),
        (TOKENS, "", b"", True),
        (TOKENS, "", b"0", False),
        (TOKENS, "0", b"", False),
        (TOKENS, "YES", b"Yes", False),
        (TOKENS, "1", b"1.0", False),
        (TOKENS, "1", b"1\0", False),
        (TOKENS, "1 2", "1\u00a02".encode(), False),
        (TOKENS, "x", b"\xff\xfe", False),
        (CLOSE, "1", b"1.0", True),
        (CLOSE, "0.3", b"0.30000000000000004", True),
        (CLOSE, "0.3", b"0.31", False),
        (CLOSE, "1000000.0", b"1000000.9", True),
        (CLOSE, "1000000", b"1000001", False),
        (CLOSE, "007", b"7", True),
        (CLOSE, "1e-7", b"0", True),
        (CLOSE, "ok 0.5", b"ok .5", True),
        (CLOSE, "ok 0.5", b"no .5", False),
        (CLOSE, "1.5", b"nan", False),
        (CLOSE, "1.5", b"inf", False),
        (CLOSE, "nan", b"nan", True),
        (CLOSE, "10.0", b"1_0.0", False),
        (CLOSE, "1e999", b"1e999", True),
        (CLOSE, "1.0", b"0.999999", True),
        (CLOSE, "1.0", b"1.000001", True),
        (CLOSE, "1.0", b"0.9999989", False),
        (CLOSE, "1.0", b"1.0000010000011", False),
        (CLOSE, "1e-10", b"0.0000010001", True),
        (CLOSE, "0", b"0.000001", True),
        (CLOSE, "0", b"0.0000010000000000000001", False),
        (CLOSE, "1e400", b"2e400", False),
        (CLOSE, "1e400", b"1.0000001e400", True),
        (CLOSE, "1e400", b"-1e400", False),
        (CLOSE, "1e400", b"1e401", False),
        (CLOSE, "1.7e308", b"-1.7e308", False),
        (CLOSE, "1e-400", b"2e-400", True),
        (CLOSE, "1e99999999999999999999", b"2e99999999999999999999", False),
        (CLOSE, "1e-99999999999999999999", b"0", True),
        (Comparator(absolute_tolerance=0.1), "0.3", b"0.2", True),
        (Comparator(absolute_tolerance=0.1), "1000000.3", b"1000000.2", True),
        (Comparator(absolute_tolerance=1e-9), "1000000000.000000001", b"1000000000.0", True),
        (Comparator(absolute_tolerance=1e-9), "1000000000.000000002", b"1000000000.0", False),
        (CLOSE, "1.0", b"1e999", False),
        (CLOSE, "1.0", b"1." + b"0" * 5000, False),
        (ANY_CASE, "YES no", b"Yes NO", True),
        (ANY_CASE, "YES", b"NO", False),
        (Comparator(ComparatorKind.LINES, ignore_case=True), "A b\n", b"a B", True),
        (Comparator(ComparatorKind.UNORDERED_LINES, ignore_case=True), "A\nb\n", b"B\na", True),
        (Comparator(ComparatorKind.EXACT, ignore_case=True), "A", b"a\n", False),
        (KATTIS, "100", b"110", True),
        (KATTIS, "100", b"111", False),
        (KATTIS, "100", b"90.0", True),
        (KATTIS, "90", b"100", False),
        (KATTIS, "0", b"0.0", True),
        (KATTIS, "0", b"1e-9", False),
        (KATTIS, "-10", b"-11", True),
        (KATTIS, "x 10", b"X 11", False),
        (KATTIS, "10", b"ten", False),
        (Comparator(ComparatorKind.KATTIS, relative_tolerance=1e-6), "1.0", b"0.999999", True),
        (Comparator(ComparatorKind.KATTIS, relative_tolerance=1e-6), "0.999999", b"1.0", False),
        (KATTIS, "1e400", b"1.1e400", True),
        (KATTIS, "1e400", b"1.2e400", False),
        (KATTIS_ABSOLUTE, "5", b"6", True),
        (KATTIS_ABSOLUTE, "5", b"6.5", False),
        (Comparator(ComparatorKind.KATTIS), "5", b"5.0", False),
    ],
)
def test_each_comparator_compares_text_by_its_rule(
    comparator: Comparator, expected: str, actual: bytes, same: bool
) -> None:
    assert same_text(expected, actual, comparator) is same


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (1, 2, False),
        (1, True, False),
        (True, 1, False),
        (0, False, False),
        (True, True, True),
        (False, None, False),
        (None, None, True),
        (0.3, 0.1 + 0.2, True),
        (0.0, 1e-17, True),
        (0.3, 0.3001, False),
        (2**53, 2**53 + 1, False),
        (10**400, 1.0, False),
        (3, 3.0, True),
        (3.0, 3, True),
        (0, -0.0, True),
        (10**9, 10**9 + 0.5, False),
        (10**10, 10.0**10 + 1, False),
        (10.0**10, 10**10 + 1, True),
        (10**15, 1e15 + 0.125, False),
        (2**53 + 1, 2.0**53, False),
        (0, 1e-13, False),
        (2, 2.0000000000000004, False),
        (2.0, 2.0000000000000004, True),
        ([10**9, {"a": (10**9,)}], [10**9, {"a": [10**9 + 0.5]}], False),
        ([1e9, {"a": (1e9,)}], [10**9, {"a": [10**9 + 0.5]}], True),
        (1e308, 10**400, False),
        (1, math.inf, False),
        (1, math.nan, False),
        ("1", 1, False),
        ("a", "a", True),
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
        ([1, [2, [3]]], (1, (2, (3,))), True),
        ([1], [1, 1], False),
        ([], {}, False),
        ([], None, False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, 1e308, False),
    ],
)
def test_values_are_compared_like_python_except_bools_and_rounding(
    expected: object, actual: object, same: bool
) -> None:
    assert same_value(expected, actual) is same


@pytest.mark.parametrize("kind", ComparatorKind)
@pytest.mark.parametrize("money", ["5 $", "5$", "$5"])
def test_an_amount_of_money_is_no_number_in_the_output_of_a_program(kind: ComparatorKind, money: str) -> None:
    """LiveCodeBench's grader says the same: a token that differs must be a number."""
    for tolerance in (0.0, 1e-6) if kind not in (EXACT.kind, LINES.kind) else (0.0,):
        rule = Comparator(kind, tolerance)
        assert not same_text("5", money.encode(), rule)
        assert not same_text(money, b"5", rule)


def test_a_float_tolerance_widens_the_comparison_of_values_but_not_of_integers() -> None:
    assert same_value([1.0], [1.0009], 1e-3)
    assert not same_value([1.0], [1.0009])
    assert not same_value([1000], [1001], 1e-2)
    assert not same_value([1000], [1000.001], 1e-2)
    assert same_value(1.0, 0.999999, 1e-6)
    assert not same_value(10**7, 10**7 + 1.0, 1e-6, 1e-7)  # the comparator of imported HumanEval
    assert same_value(float(10**7), 10**7 + 1, 1e-6, 1e-7)


def test_deeply_nested_values_are_compared_without_recursion() -> None:
    left: list[object] = []
    right: list[object] = []
    for _ in range(100_000):
        left, right = [left], [right]
    assert same_value(left, right)
    assert not same_value(left, [right])


@pytest.mark.parametrize(
    "encoded", [b"", b"{", b"1 2", b"\xff", b"[" * 1_000_000, b'{"a":' * 1_000_000, b"nul", b"\0", b"1" * 99 + b"x"]
)
def test_a_result_that_is_not_one_json_value_is_unreadable(encoded: bytes) -> None:
    with pytest.raises(UnreadableResult):
        parse_result(encoded, "[" * 2_000_000)


def test_a_result_far_longer_than_expected_is_not_parsed() -> None:
    with pytest.raises(UnreadableResult, match="far more"):
        parse_result(b"[" + b"[]," * 10_000 + b"[]]", "[1, 2]")


def test_integers_too_long_to_convert_are_compared_by_their_digits() -> None:
    digits = NINES
    assert parse_result(digits.encode(), NINES) == HugeInt(digits)
    assert same_value(HugeInt(digits), parse_result(digits.encode(), NINES))
    assert not same_value(10**30, parse_result(digits.encode(), NINES))
    assert parse_result(b"-" + b"9" * 4300, NINES) == -int("9" * 4300)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(json_values)
def test_every_value_equals_itself_after_json_and_fits_its_bound(value: object) -> None:
    for encoded in (json.dumps(value), json.dumps(value, indent=2), json.dumps(value, ensure_ascii=False)):
        data = encoded.encode("utf8", "surrogatepass")
        if b"\xed" not in data:  # a lone surrogate has no UTF-8
            assert same_value(value, parse_result(data, json.dumps(value)))


@given(st.integers(), st.integers() | st.floats() | st.booleans(), st.sampled_from([0.0, 1e-6, 0.5]))
def test_an_expected_integer_equals_only_that_number(wanted: int, near: float, tolerance: float) -> None:
    for actual in (near, wanted + near, float(wanted), wanted * (1 + 1e-12)):
        is_same = wanted == actual and not isinstance(actual, bool)
        assert same_value([wanted], [actual], tolerance, tolerance) is is_same


digits = st.decimals(-1000, 1000, places=8) | st.decimals(-1, 1, places=20)


@given(digits, st.sampled_from(["0", "1e-6", "-1e-6", "1e-9", "1e-15"]), st.sampled_from(["0", "1e-18", "-1e-18"]))
def test_a_tolerance_is_exact_to_the_last_digit(wanted: Decimal, far: str, more: str) -> None:
    actual = wanted + Decimal(far) + Decimal(more)
    one, other, most = Fraction(wanted), Fraction(actual), Fraction("1e-6")
    is_close = abs(one - other) <= most * max(Fraction(1), abs(one), abs(other))
    assert same_text(f"{wanted:f}e0", f"{actual:f}e0".encode(), CLOSE) is is_close
    is_close = abs(one - other) <= most * max(Fraction(1), abs(one))
    kattis = Comparator(ComparatorKind.KATTIS, 1e-6)
    assert same_text(f"{wanted:f}", f"{actual:f}".encode(), kattis) is is_close


@given(st.text(), st.binary(), st.sampled_from(list(ComparatorKind)), st.sampled_from([0.0, 1e-6]))
def test_no_output_makes_a_comparator_raise(
    expected: str, actual: bytes, kind: ComparatorKind, tolerance: float
) -> None:
    assert same_text(expected, actual, Comparator(kind, tolerance)) in (True, False)
    assert same_text(expected, expected.encode("utf8", "surrogatepass"), Comparator(kind, tolerance))


def by_definition(expected: str, actual: bytes, comparator: Comparator) -> bool:
    """All lines or tokens as lists."""
    wanted = expected.encode("utf8", "surrogatepass")
    if comparator.kind is ComparatorKind.EXACT:
        return wanted == actual
    if comparator.kind in (ComparatorKind.LINES, ComparatorKind.UNORDERED_LINES):
        one, other = ([line.rstrip() for line in text.rstrip().split(b"\n")] for text in (wanted, actual))
        return one == other if comparator.kind is ComparatorKind.LINES else Counter(one) == Counter(other)
    return wanted.split() == actual.split()


WHITE_TEXT = st.text(st.sampled_from("ab1 \n\n\t\r\v\f\x1c\u00a0"), max_size=12)


KINDS = [ComparatorKind.EXACT, TOKENS.kind, LINES.kind, UNORDERED.kind]


@given(WHITE_TEXT, WHITE_TEXT, st.sampled_from(KINDS), st.integers(1, 5))
def test_text_is_compared_by_its_definition(expected: str, actual: str, kind: ComparatorKind, piece_bytes: int) -> None:
    comparator = Comparator(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparators, "_PIECE_BYTES", piece_bytes)
        same = same_text(expected, actual.encode(), comparator)
    assert same is by_definition(expected, actual.encode(), comparator)


@given(st.text(st.sampled_from("ab \n\t")), st.text(st.sampled_from(" \n\t"), min_size=1), st.integers(1, 5))
def test_tokens_are_the_same_wherever_pieces_end(text: str, white: str, piece_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparators, "_PIECE_BYTES", piece_bytes)
        assert same_text(text, white.join(["", *text.split(), ""]).encode(), TOKENS)
        assert not same_text(text + "b", text.encode(), TOKENS)


@given(st.lists(st.sampled_from(["a", "a ", "b", "", "c d"])), st.randoms(), st.sampled_from([0, 10_000]))
def test_lines_in_another_order_are_equal(lines: list[str], random: Random, many_lines: int) -> None:
    shuffled = random.sample(lines, len(lines))
    text, other = "\n".join(["x", *lines, "x"]), "\n".join(["x", *shuffled, "x"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparators, "_MANY_LINES", many_lines)
        assert same_text(text, other.encode(), UNORDERED)
        assert not same_text(text, other.replace("x", "a", 1).encode(), UNORDERED)


@pytest.mark.parametrize("comparator", [CLOSE, LINES, UNORDERED, KATTIS], ids=lambda one: one.kind)
def test_a_comparison_needs_little_memory_beside_its_texts(comparator: Comparator) -> None:
    expected = "".join(f"0.{number % 991} \n" for number in range(150_000)) + "0.1"
    actual = expected.replace(" ", "0" if comparator in (CLOSE, KATTIS) else "  ").encode()
    text_bytes = len(expected) + 2 * len(actual)
    tracemalloc.start()
    try:
        assert same_text(expected, actual, comparator)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < text_bytes + 5 * 2**20  # lists of all tokens or lines take ten times as much as the texts


def test_a_large_result_with_more_values_than_expected_is_not_decoded() -> None:
    expected = json.dumps([7] * 20_000)
    for result in ("[" + "[]," * 20_000 + "[]]", json.dumps([7] * 20_001), json.dumps({"a": [7] * 20_000})):
        with pytest.raises(UnreadableResult, match="more values"):
            parse_result(result.encode(), expected)
    assert parse_result(json.dumps([7.0] * 20_000).encode(), expected) == [7.0] * 20_000


def test_the_garbage_collector_is_off_while_any_thread_decodes() -> None:
    inside, may_leave = threading.Event(), threading.Event()

    def decode() -> None:
        with without_collections():
            inside.set()
            assert may_leave.wait(60)

    assert gc.isenabled()
    other = threading.Thread(target=decode)
    with without_collections():
        other.start()
        assert inside.wait(60)
    assert not gc.isenabled()  # the other thread still decodes
    may_leave.set()
    other.join(60)
    assert gc.isenabled()
