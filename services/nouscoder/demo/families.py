"""The families of the demo's problems: each has a statement, programs, an oracle and an input maker, with parameters.

A family's `program` is a right answer and `wrong` holds wrong ones. `solve` computes the expected output independently
of the program, so that running the program against the tests checks both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nouscoder.demo.family import (
    LETTER_PAIRS,
    LETTERS,
    NUMBERS,
    WORD_SPACE,
    Family,
    InputMaker,
    Parameters,
    ascending,
    integer_pairs,
    integers,
    number_lists,
    pairs,
    sentences,
    singles,
    word_lines,
)


def _reading(lines: str, parse: Callable[[str], Any]) -> Callable[..., Family]:
    def make(
        name: str,
        space: tuple[Parameters, ...],
        statement: str,
        program: str,
        wrong: tuple[str, ...],
        make_inputs: InputMaker,
        solve: Callable[..., Any],
    ) -> Family:
        def solved(text: str, parameters: Parameters) -> str:
            answer = solve(parse(text), *parameters)
            return "\n".join(map(str, answer)) if isinstance(answer, list) else str(answer)

        programs = tuple(lines + each for each in wrong)
        return Family(name, space, statement, lines + program, programs, make_inputs, solved)

    return make


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split()]


_list = _reading("a=list(map(int,input().split()))\n", _integers)
_int = _reading("n=int(input())\n", int)
_two = _reading("x,y=map(int,input().split())\n", _integers)
_digits = _reading("n=input()\n", str.strip)
_word = _reading("s=input()\n", str.strip)
_words = _reading("w=input().split()\n", str.split)


def _yes(condition: bool) -> str:
    return "yes" if condition else "no"


def _joined(values: list[int]) -> str:
    return " ".join(str(value) for value in values)


_RANKS = singles(range(2, 40))


def _ordered(values: list[int]) -> list[int]:
    """The numbers in order, sorted by insertion, so that the oracle does not use the same call as the program."""
    done: list[int] = []
    for value in values:
        place = sum(other <= value for other in done)
        done.insert(place, value)
    return done


LISTS = (
    _list("total_plus", NUMBERS, "Read numbers. Print their sum plus {a}.", "print(sum(a)+{a})",
          ("print(sum(a)-{a})", "print(len(a)+{a})"), number_lists(0, 99), lambda x, a: sum(x, start=a)),
    _list("largest_times", NUMBERS, "Read numbers. Print the largest times {a}.", "print(max(a)*{a})",
          ("print(min(a)*{a})", "print(max(a))"), number_lists(1, 99, 2), lambda x, a: _ordered(x)[-1] * a),
    _list("smallest_plus", NUMBERS, "Read numbers. Print the smallest plus {a}.", "print(min(a)+{a})",
          ("print(max(a)+{a})", "print(min(a)-{a})"), number_lists(1, 99, 2), lambda x, a: _ordered(x)[0] + a),
    _list("sort_first", _RANKS, "Read numbers. Print the {a} smallest in order.", "print(*sorted(a)[:{a}])",
          ("print(*a[:{a}])", "print(*sorted(a)[{a}:])"), number_lists(0, 99, 41),
          lambda x, a: _joined(_ordered(x)[: a])),
    _list("sort_last", _RANKS, "Read numbers. Print the {a} largest in order.", "print(*sorted(a)[-{a}:])",
          ("print(*a[-{a}:])", "print(*sorted(a)[:{a}])"), number_lists(0, 150, 41),
          lambda x, a: _joined(_ordered(x)[len(x) - a :])),
    _list("rank", _RANKS, "Read numbers. Print number {a} in sorted order.", "print(sorted(a)[{a}-1])",
          ("print(sorted(a)[{a}])", "print(a[{a}-1])"), number_lists(0, 99, 41), lambda x, a: _ordered(x)[a - 1]),
    _list("sorted_scaled", NUMBERS, "Read numbers. Print them sorted, each times {a}.",
          "for x in sorted(a):\n print(x*{a})", ("for x in a:\n print(x*{a})", "for x in sorted(a):\n print(x+{a})"),
          number_lists(0, 99, 3), lambda x, a: [value * a for value in _ordered(x)]),
    _list("count_above", NUMBERS, "Read numbers. Count those above {a}.", "print(sum(x>{a} for x in a))",
          ("print(sum(x<{a} for x in a))", "print(sum(x>={a} for x in a))"), number_lists(0, 120),
          lambda x, a: len([value for value in x if value >= a + 1])),
    _list("count_below", NUMBERS, "Read numbers. Count those below {a}.", "print(sum(x<{a} for x in a))",
          ("print(sum(x>{a} for x in a))", "print(sum(x<={a} for x in a))"), number_lists(0, 120),
          lambda x, a: len([value for value in x if value <= a - 1])),
    _list("count_multiples", NUMBERS, "Read numbers. Count the multiples of {a}.", "print(sum(x%{a}==0 for x in a))",
          ("print(sum(x%{a} for x in a))", "print(sum(x//{a}==0 for x in a))"), number_lists(0, 200),
          lambda x, a: len([value for value in x if value // a * a == value])),
    _list("each_plus", NUMBERS, "Read numbers. Print each plus {a}.", "for x in a:\n print(x+{a})",
          ("for x in a:\n print(x-{a})", "print(sum(a)+{a})"), number_lists(0, 99),
          lambda x, a: [value + a for value in x]),
    _list("each_times", NUMBERS, "Read numbers. Print each times {a}.", "for x in a:\n print(x*{a})",
          ("for x in a:\n print(x+{a})", "print(sum(a)*{a})"), number_lists(0, 99),
          lambda x, a: [value * a for value in x]),
    _list("keep_above", NUMBERS, "Read numbers. Print those above {a}.", "for x in a:\n if x>{a}:print(x)",
          ("for x in a:\n if x<{a}:print(x)", "for x in a:\n if x>={a}:print(x)"), number_lists(0, 120),
          lambda x, a: [value for value in x if value - a >= 1]),
    _list("sum_above_list", NUMBERS, "Read numbers. Add up those above {a}.", "print(sum(x for x in a if x>{a}))",
          ("print(sum(x for x in a if x<{a}))", "print(sum(x>{a} for x in a))"), number_lists(0, 120),
          lambda x, a: sum(value for value in x if value - a >= 1)),
    _list("count_value", NUMBERS, "Read numbers. Count how often {a} is there.", "print(a.count({a}))",
          ("print(a.index({a}))", "print(len(a)-{a})"), number_lists(0, 120),
          lambda x, a: sum(value == a for value in x)),
    _list("is_member", NUMBERS, "Read numbers. Print yes if {a} is there, else no.",
          "print('yes' if {a} in a else 'no')", ("print('no' if {a} in a else 'yes')", "print({a} in a)"),
          number_lists(0, 120), lambda x, a: _yes(str(a) in map(str, x))),
    _list("spread", NUMBERS, "Read numbers. Print largest minus smallest plus {a}.", "print(max(a)-min(a)+{a})",
          ("print(max(a)+min(a)+{a})", "print(max(a)-{a})"), number_lists(0, 99, 2),
          lambda x, a: _ordered(x)[-1] - _ordered(x)[0] + a),
    _list("different", NUMBERS, "Read numbers. Add up the different ones, plus {a}.", "print(sum(set(a))+{a})",
          ("print(sum(a)+{a})", "print(sum(set(a))-{a})"), number_lists(0, 30, 3),
          lambda x, a: sum(dict.fromkeys(x)) + a),
)  # fmt: skip


_SMALL_PAIRS = pairs(range(2, 10), range(2, 100))


def _times_in(value: int, divisor: int) -> int:
    return 0 if value % divisor else 1 + _times_in(value // divisor, divisor)


ARITHMETIC = (
    _int("plus", NUMBERS, "Read n. Print n plus {a}.", "print(n+{a})", ("print(n-{a})", "print(n)"), integers(0, 500),
         lambda n, a: n + a),
    _int("times", NUMBERS, "Read n. Print n times {a}.", "print(n*{a})", ("print(n+{a})", "print(n**{a})"),
         integers(0, 99), lambda n, a: n * a),
    _int("minus_from", NUMBERS, "Read n. Print {a} minus n.", "print({a}-n)", ("print(n-{a})",), integers(0, 200),
         lambda n, a: a - n),
    _int("modulo", NUMBERS, "Read n. Print the rest of n by {a}.", "print(n%{a})", ("print(n//{a})", "print({a}%n)"),
         integers(1, 999), lambda n, a: n % a),
    _int("divided", NUMBERS, "Read n. Print n divided by {a}.", "print(n//{a})", ("print(n/{a})", "print(n%{a})"),
         integers(100, 999), lambda n, a: (n - n % a) // a),
    _int("linear", _SMALL_PAIRS, "Read n. Print n times {a} plus {b}.", "print(n*{a}+{b})",
         ("print(n*{a})", "print(n+{a}*{b})"), integers(2, 99), lambda n, a, b: n * a + b),
    _int("square", NUMBERS, "Read n. Print n squared plus {a}.", "print(n*n+{a})", ("print(n+n+{a})", "print(n*n*{a})"),
         integers(0, 60), lambda n, a: n**2 + a),
    _int("distance", NUMBERS, "Read n. Print how far n is from {a}.", "print(abs(n-{a}))",
         ("print(n-{a})", "print(abs(n+{a}))"), integers(0, 120), lambda n, a: max(n - a, a - n)),
    _int("larger", NUMBERS, "Read n. Print the larger of n and {a}.", "print(max(n,{a}))",
         ("print(min(n,{a}))", "print(max(n,0))"), integers(0, 120), lambda n, a: sorted((n, a))[1]),
    _int("smaller", NUMBERS, "Read n. Print the smaller of n and {a}.", "print(min(n,{a}))",
         ("print(max(n,{a}))", "print(n)"), integers(0, 120), lambda n, a: sorted((n, a))[0]),
    _two("sum_plus", NUMBERS, "Read x and y. Print their sum plus {a}.", "print(x+y+{a})",
         ("print(x*y+{a})", "print(x+{a})"), integer_pairs(1, 99), lambda x, a: sum(x) + a),
    _two("product_minus", NUMBERS, "Read x and y. Print their product minus {a}.", "print(x*y-{a})",
         ("print(x*y+{a})", "print(x-{a})"), integer_pairs(1, 60), lambda x, a: x[0] * x[1] - a),
    _digits("digit_sum", NUMBERS, "Read n. Print its digit sum plus {a}.", "print(sum(map(int,n))+{a})",
            ("print(len(n)+{a})", "print(sum(map(int,n)))"), integers(10, 9999),
            lambda s, a: sum(int(digit) for digit in s) + a),
)  # fmt: skip

CONDITIONS = (
    _int("above", NUMBERS, "Read n. Print yes if n is above {a}, else no.", "print('yes' if n>{a} else 'no')",
         ("print('yes' if n<{a} else 'no')", "print('yes' if n>={a} else 'no')"), integers(0, 120),
         lambda n, a: _yes(n >= a + 1)),
    _int("below", NUMBERS, "Read n. Print yes if n is below {a}, else no.", "print('yes' if n<{a} else 'no')",
         ("print('yes' if n>{a} else 'no')", "print('yes' if n<={a} else 'no')"), integers(0, 120),
         lambda n, a: _yes(n <= a - 1)),
    _int("multiple", NUMBERS, "Read n. Print yes if {a} divides n, else no.", "print('yes' if n%{a}==0 else 'no')",
         ("print('yes' if n%{a}==1 else 'no')", "print('yes' if n//{a}==0 else 'no')"), integers(0, 300),
         lambda n, a: _yes(n // a * a == n)),
    _int("within", ascending(range(2, 50), range(3, 50)), "Read n. Print yes if n is from {a} to {b}, else no.",
         "print('yes' if {a}<=n<={b} else 'no')",
         ("print('yes' if {a}<n<{b} else 'no')", "print('yes' if n<={b} else 'no')"), integers(0, 120),
         lambda n, a, b: _yes(n in range(a, b + 1))),
    _int("even_or_odd", NUMBERS, "Read n. Add {a} if n is even, else take {a} away.", "print(n-{a} if n%2 else n+{a})",
         ("print(n+{a} if n%2 else n-{a})", "print(n+{a})"), integers(0, 120), lambda n, a: n + (1, -1)[n % 2] * a),
    _two("sum_above", NUMBERS, "Read x and y. Print yes if their sum is above {a}, else no.",
         "print('yes' if x+y>{a} else 'no')",
         ("print('yes' if x+y<{a} else 'no')", "print('yes' if x+y>={a} else 'no')"), integer_pairs(0, 70),
         lambda x, a: _yes(sum(x) >= a + 1)),
    _int("capped", ascending(range(2, 50), range(3, 50)), "Read n. Print n kept between {a} and {b}.",
         "print(max({a},min(n,{b})))", ("print(min({a},max(n,{b})))", "print(min(n,{b}))"), integers(0, 120),
         lambda n, a, b: sorted((n, a, b))[1]),
)  # fmt: skip

LOOPS = (
    _int("sum_to_n", NUMBERS, "Read n. Add up 1 to n, then times {a}.",
         "s=0\nfor i in range(n+1):\n s+=i\nprint(s*{a})",
         ("s=0\nfor i in range(n):\n s+=i\nprint(s*{a})", "s=0\nfor i in range(n+1):\n s+=i\nprint(s)"),
         integers(2, 60), lambda n, a: n * (n + 1) // 2 * a),
    _int("steps", NUMBERS, "Read n. Print 0 up to n in steps of {a}.", "print(*range(0,n+1,{a}))",
         ("print(*range(0,n,{a}))", "print(*range({a},n+1))"), integers(1, 200),
         lambda n, a: _joined([v for v in range(n + 1) if v % a == 0])),
    _int("table", NUMBERS, "Read n. Print the first n multiples of {a}.", "for i in range(n):\n print(i*{a}+{a})",
         ("for i in range(n):\n print(i*{a})", "for i in range(n-1):\n print(i*{a}+{a})"), integers(1, 20),
         lambda n, a: [a * i for i in range(1, n + 1)]),
    _int("times_divisible", _RANKS, "Read n. Print how often {a} divides n.",
         "c=0\nwhile n%{a}==0:\n n//={a}\n c+=1\nprint(c)",
         ("c=1\nwhile n%{a}==0:\n n//={a}\n c+=1\nprint(c)", "print(n//{a})"), integers(2, 5000),
         _times_in),
    _int("multiples_to_n", NUMBERS, "Read n. Count the multiples of {a} from 1 to n.",
         "c=0\nfor i in range(1,n+1):\n c+=i%{a}==0\nprint(c)",
         ("c=0\nfor i in range(1,n):\n c+=i%{a}==0\nprint(c)", "print(n%{a})"), integers(1, 300), lambda n, a: n // a),
    _int("countdown", NUMBERS, "Read n. Count down from n plus {a} to 1.", "for i in range(n+{a},0,-1):\n print(i)",
         ("for i in range(n,0,-1):\n print(i)", "for i in range(n+{a},1,-1):\n print(i)"), integers(0, 30),
         lambda n, a: list(reversed(range(1, n + a + 1)))),
)  # fmt: skip


def _swap(text: str, old: str, new: str) -> str:
    return "".join(new if letter == old else letter for letter in text)


STRINGS = (
    _word("repeat", NUMBERS, "Read a word. Print it {a} times.", "print(s*{a})", ("print(s+{a})", "print(s*2*{a})"),
          word_lines(1, 6), lambda s, a: "".join(s for _ in range(a))),
    _word("count_letter", LETTERS, "Read a word. Count the letter '{a}'.", "print(s.count('{a}'))",
          ("print(s.find('{a}'))", "print(len('{a}'))"), word_lines(2, 9),
          lambda s, a: sum(letter == a for letter in s)),
    _word("replace", LETTER_PAIRS, "Read a word. Turn every '{a}' into '{b}'.", "print(s.replace('{a}','{b}'))",
          ("print(s.replace('{b}','{a}'))", "print(s)"), word_lines(2, 9), lambda s, a, b: _swap(s, a, b)),
    _word("remove", LETTERS, "Read a word. Print it without the letter '{a}'.", "print(s.replace('{a}',''))",
          ("print(s.count('{a}'))", "print(s)"), word_lines(3, 9),
          lambda s, a: "".join(letter for letter in s if letter != a)),
    _word("first_letters", _RANKS, "Read a word. Print its first {a} letters.", "print(s[:{a}])",
          ("print(s[{a}:])", "print(s[{a}])"), word_lines(41, 44), lambda s, a: s[: a]),
    _word("last_letters", _RANKS, "Read a word. Print its last {a} letters.", "print(s[-{a}:])",
          ("print(s[{a}:])", "print(s[-{a}])"), word_lines(41, 44), lambda s, a: s[len(s) - a :]),
    _word("drop_letters", _RANKS, "Read a word. Drop its first {a} letters.", "print(s[{a}:])",
          ("print(s[:{a}])", "print(s[-{a}:])"), word_lines(41, 44), lambda s, a: s[a:]),
    _word("append", WORD_SPACE, "Read a word. Print it and then '{a}'.", "print(s+'{a}')",
          ("print('{a}'+s)", "print(s,'{a}')"), word_lines(2, 7), lambda s, a: f"{s}{a}"),
    _word("prepend", WORD_SPACE, "Read a word. Print '{a}' and then it.", "print('{a}'+s)",
          ("print(s+'{a}')", "print('{a}',s)"), word_lines(2, 7), lambda s, a: f"{a}{s}"),
    _word("contains", LETTERS, "Read a word. Print yes if it has the letter '{a}', else no.",
          "print('yes' if '{a}' in s else 'no')", ("print('no' if '{a}' in s else 'yes')", "print('{a}' in s)"),
          word_lines(2, 9), lambda s, a: _yes(s.count(a) > 0)),
    _word("starts_with", LETTERS, "Read a word. Print yes if it starts with '{a}', else no.",
          "print('yes' if s[0]=='{a}' else 'no')",
          ("print('yes' if s[1]=='{a}' else 'no')", "print('yes' if s=='{a}' else 'no')"), word_lines(2, 6),
          lambda s, a: _yes(s.startswith(a))),
    _word("length_plus", NUMBERS, "Read a word. Print its length plus {a}.", "print(len(s)+{a})",
          ("print(len(s))", "print(len(s)-{a})"), word_lines(1, 16), lambda s, a: sum(1 for _ in s) + a),
    _word("capitals", WORD_SPACE, "Read a word. Print it in capitals, then '{a}'.", "print(s.upper()+'{a}')",
          ("print(s+'{a}')", "print(s.lower()+'{a}')"), word_lines(2, 7),
          lambda s, a: "".join(chr(ord(letter) - 32) for letter in s) + a),
    _word("backwards", LETTERS, "Read a word. Print it backwards, then '{a}'.", "print(s[::-1]+'{a}')",
          ("print(s[-1]+'{a}')", "print(s+'{a}')"), word_lines(3, 8), lambda s, a: "".join(reversed(s)) + a),
    _word("find_letter", LETTERS, "Read a word. Print where '{a}' is first, or -1.", "print(s.find('{a}'))",
          ("print(s.count('{a}'))", "print(s.index('{a}'))"), word_lines(3, 9),
          lambda s, a: next((i for i, letter in enumerate(s) if letter == a), -1)),
    _words("join", LETTERS, "Read words. Join them with '{a}'.", "print('{a}'.join(w))",
           ("print(''.join(w))", "print('{a}',w)"), sentences(2, 5), lambda w, a: " ".join(w).replace(" ", a)),
    _words("count_word", WORD_SPACE, "Read words. Count the word '{a}'.", "print(w.count('{a}'))",
           ("print(w.index('{a}'))", "print(len('{a}'))"), sentences(2, 5), lambda w, a: sum(word == a for word in w)),
    _words("word_lengths", NUMBERS, "Read words. Print each length plus {a}.", "for x in w:\n print(len(x)+{a})",
           ("for x in w:\n print(len(w)+{a})", "for x in w:\n print(len(x)-{a})"), sentences(4, 7),
           lambda w, a: [len(word) + a for word in w]),
)  # fmt: skip
