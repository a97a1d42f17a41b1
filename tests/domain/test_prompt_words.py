"""What distinguishes two prompts: pairs that a person labelled, for equality and for the words that leaks compare."""

# ruff: noqa: RUF001

from __future__ import annotations

import unicodedata
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    ("Input:\n- n is even\n- m is odd", "Input:\nn is even\nm is odd"),
    ("Input:\n* one", "Input:\none"),
    ("the \\text{sum} is", "the sum is"),
    ("\\operatorname{gcd}(a, b)", "gcd(a, b)"),
    ("x₁", "x_1"),
    ("x_{i}", "xᵢ"),
    ("x⁻¹", "x^{-1}"),
    ("\\forall x \\in \\mathbb{R}", "∀x ∈ ℝ"),
    ("a \\wedge \\neg b", "a ∧ ¬b"),
    ("A \\cup B \\not\\subset C", "A ∪ B ⊄ C"),
    ("\\lfloor \\sqrt{x} \\rfloor", "⌊√x⌋"),
    ("90^{\\circ}", "90°"),
    ("a \\Leftrightarrow b", "a ⇔ b"),
    ("\\varphi + \\Delta", "φ + Δ"),
    ("\\(x\\)", "$x$"),
    ("f^{\\prime}(x)", "f′(x)"),
    ("10<sup>5</sup> <b>lines</b>", "10^5 lines"),
    ("*n* and _m_", "n and m"),
    ("100,000", "100000"),
    ("输入：n", "输入: n"),
    ("```\n1 2\n```", "1 2"),
    ("-----Input-----\nOne line.", "Input\nOne line."),
    ("$5$ apples of $n$", "5 apples of n"),
    ("at most 2$n$ and $1$ and $2$", "at most 2 n and 1 and 2"),
    ("for 1 $ n = 5 $ times", "for 1 n = 5 times"),
    ("$$x = 5$$", "x = 5"),
    ("costs $5 and $10", "costs 5$ and 10$"),
    ("costs \\$1,500.", "costs 1,500\\$."),
    ("5 €", "€5"),
    ('print "5"', "print “5”"),
    ('["1", "2"]', "[“1”, “2”]"),
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
    ("print n!!", "print n!"),
    ("f''(x)", "f'(x)"),
    ("f'(x)", "f(x)"),
    ("print a?b", "print a b"),
    ("print a ? b : c", "print a b c"),
    ("print x:y", "print x y"),
    ("a := b", "a = b"),
    ("print !x", "print x"),
    ("∃!x", "∃x"),
    ("‖x‖", "|x|"),
    ("x_{1}2", "x_{12}"),
    ("x²3", "x²³"),
    ("1½", "11/2"),
    ("2^{1}0", "2^10"),
    ("print .5", "print 5"),
    ("[1..n]", "[1.n]"),
    ("split by ','", "split by ';'"),
    ("replace ? by *", "replace . by *"),
    ("print \\n", "print n"),
    ("n ∈ ℝ", "n ∈ R"),
    ("5‰", "5"),
    ("2 **3", "2 3"),
    ("a === b", "a b"),
    ("(0, 1]", "(0, 1)"),
    ("[100,200]", "100200"),
    ("x ∉ S", "x ∈ S"),
    ("a >> b", "a >>> b"),
    ("1〜5", "1 5"),
    ("두 수의 합", "두 수의 차"),
    ("昇順", "降順"),
    ("#..\n.#.", ".#.\n#.."),
    ("Return the answer.\n\n1 <= n <= 50", "Return the answer.\n\n1 <= n <= 10^5"),  # LeetCode's I and II
    ("Return the minimum cost.", "Return the maximum cost."),
    ("```\n..#\n```", "```\n.#.\n```"),
    ("costs 5$", "costs 5"),
    ("costs $5.", "costs 5."),
    ("costs $5 and $10", "costs 5 and 10"),
    ("costs 5$, or (10$)", "costs 5, or (10)"),
    ("costs \\$5 of $n$", "costs 5 of n"),
    ("costs 5$", "costs 5€"),
    ("costs €5", "costs 5"),
    ("costs 5 €", "costs 5 £"),
    ("replace by $1", "replace by 1"),
    ('a 5" screen', "a 5 screen"),
    ("a 5″ screen", "a 5 screen"),
    ("a 5′ pole", "a 5″ pole"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_texts_that_say_the_same_are_equal(one: str, other: str) -> None:
    assert words_of(one) == words_of(other)
    assert exact_key(one) == exact_key(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_texts_that_ask_for_something_else_differ(one: str, other: str) -> None:
    assert exact_key(one) != exact_key(other)


@pytest.mark.parametrize(
    "signs",
    [
        "$",
        "$a ",
        "5$",
        "1",
        "1,",
        '5"',
        "$ ",
        "!",
        "?",
        ".",
        "'",
        "`",
        "*",
        "_",
        "-",
        " ",
        "\n",
        "<b ",
        "- a\n",
        "\\text{",
        "^{",
    ],
)
def test_a_text_of_signs_is_read_in_linear_time(signs: str) -> None:
    """A quadratic search in 100,000 signs takes minutes, and this test its limit."""
    assert words_of(f"print {signs * 100_000} Z")[0] == "print"


def test_every_sign_of_mathematics_counts_and_differs_from_the_others() -> None:
    """Of Unicode's category Sm; equal may be only what NFKC, or a list of signs that look alike, makes equal."""
    alike = ["*×∗⋅", "≤⩽≦", "≥⩾≧", "-−", "/÷∕⁄", "|∣", "~∼"]
    leaders = {sign: group[0] for group in alike for sign in group}
    signs = [chr(code) for code in range(0x3000) if unicodedata.category(chr(code)) == "Sm"]
    found: dict[bytes, set[str]] = defaultdict(set)
    for sign in signs:
        plain = unicodedata.normalize("NFKC", leaders.get(sign, sign))
        found[exact_key(f"print a {sign} b")].add(leaders.get(plain, plain))
    assert exact_key("print a b") not in found
    words = {"→", "←", "⇒", "⇐"}  # as ->, <-, =>
    assert [group for group in found.values() if len(group) > 1 and not group & words] == []


NAMES = st.sampled_from(["n", "x_1", "a[i]", "10^5", "数", "\\alpha", "½", "f(x)"])


@given(st.lists(st.tuples(NAMES, st.sampled_from(["+", "-", "*", "<", "≤", "&&", "∧", "%"])), min_size=1, max_size=6))
def test_spaces_and_lines_between_signs_do_not_count_but_each_sign_does(parts: list[tuple[str, str]]) -> None:
    text = " ".join(["print", *(one for part in parts for one in part), "z"])
    assert exact_key(text.replace(" * ", "*  ").replace(" < ", "\t< ")) == exact_key(text)
    assert words_of(text, exact=True) == words_of(f"  {text}\n", exact=True)
    for number, (name, sign) in enumerate(parts):
        other = [*parts]
        other[number] = (name, "+" if sign != "+" else "∨")
        assert exact_key(" ".join(["print", *(one for part in other for one in part), "z"])) != exact_key(text)


def test_an_operator_is_no_word_of_its_own_and_a_character_is_one_without_spaces() -> None:
    assert words_of("1 ≤ n ≤ 10^5 (see below)") == ["1", "≤n", "≤10", "^5", "see", "below"]
    assert words_of("给定n个数") == ["给", "定", "n", "个", "数"]
    for text in ("ภาษาไทย", "ພາສາລາວ", "ភាសាខ្មែរ", "မြန်မာ", "にほんご"):
        assert words_of(text) == list(text)
