"""What distinguishes two prompts: pairs that a person labelled, for equality and for the words that leaks compare."""

# ruff: noqa: RUF001

from __future__ import annotations

import pytest

from nouscoder.data.filters.duplicates import exact_key
from nouscoder.data.filters.words import words_of

SAME = [
    ("Add two numbers.", "add  two numbers"),
    ("Print a+b", "Print a + b"),
    ("Print a - b.", "Print a – b."),
    ("Print a - b.", "Print a\n− b."),
    ("Print a * b", "Print a × b"),
    ("Print “yes”", 'Print "yes"'),
    ("n ≤ 5", "n <= 5"),
    ("$n \\le 5$", "n ≤ 5"),
    ("n &lt; 5", "n < 5"),
    ("n \\geq m", "n >= m"),
    ("x^2 - 5x", "x² − 5x"),
    ("x^{12}", "x¹²"),
    ("\\dfrac{a}{b}", "\\frac{a}{b}"),
    ("**Input** The first line", "Input The first line"),
    ("Ｐrint ａ＋ｂ", "Print a+b"),
    ("caf\u00e9", "cafe\u0301"),
    ("计算 a+b。", "计算a + b"),
    ("a non-empty string", "a non empty string"),
    ("zero\u200bwidth", "zerowidth"),
]
DIFFERENT = [
    ("Print a + b.", "Print a - b."),
    ("Print a * b.", "Print a / b."),
    ("Print a % b.", "Print a / b."),
    ("x^2 - 5x + 6 = 0", "x^2 + 5x + 6 = 0"),
    ("x²", "x2"),
    ("x²", "x³"),
    ("a[i] < a[j]", "a[i] > a[j]"),
    ("n <= 5", "n < 5"),
    ("n \\le 5", "n \\ge 5"),
    ("n \\le 5", "n \\lt 5"),
    ("a = b", "a ≠ b"),
    ("print -5", "print 5"),
    ("print 1.5", "print 15"),
    ("print 1 23", "print 12 3"),
    ("5 %", "5 °"),
    ("5 €", "5 £"),
    ("(a+b)*c", "a+(b*c)"),
    ("\\frac{a}{b+c}", "\\frac{a}{b}+c"),
    ("print n!", "print n"),
    ("print N", "print n"),
    ("Print YES", "Print Yes"),
    ("call fooBar", "call foobar"),
    ("call foo_bar", "call foobar"),
    ("write it in C#", "write it in C"),
    ("write it in C++", "write it in C"),
    ("print 😀", "print 😎"),
    ("a & b", "a | b"),
    ("width - height", "width + height"),
    ("计算两个数的和", "计算两个数的差"),
    ("合計を出力", "差を出力"),
    ("กา", "กี"),
    ("की", "का"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_texts_that_say_the_same_are_equal(one: str, other: str) -> None:
    assert words_of(one) == words_of(other)
    assert exact_key(one) == exact_key(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_texts_that_ask_for_something_else_differ(one: str, other: str) -> None:
    assert exact_key(one) != exact_key(other)


def test_an_operator_is_no_word_of_its_own_and_a_character_is_one_without_spaces() -> None:
    assert words_of("1 ≤ n ≤ 10^5 (see below)") == ["1", "≤n", "≤10", "^5", "see", "below"]
    assert words_of("给定n个数") == ["给", "定", "n", "个", "数"]
    for text in ("ภาษาไทย", "ພາສາລາວ", "ភាសាខ្មែរ", "မြန်မာ", "にほんご"):
        assert words_of(text) == list(text)
