"""The families of the demo's problems: each has a statement, programs, an oracle and an input maker, with parameters.

A family's `program` is a right answer and `wrong` holds wrong ones. `solve` computes the expected output independently
of the program, so that running the program against the tests checks both.

Families share parameter spaces and input makers. An input maker gives edge cases first (the parameter itself, the
numbers beside it, zero, one item) and then random inputs, so that an off-by-one error or a wrong comparison fails a
test in every instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from random import Random
from string import ascii_lowercase

# The record of a family.

Parameter = int | str
Parameters = tuple[Parameter, ...]
InputMaker = Callable[[Random, Parameters], list[str]]
Solver = Callable[[str, Parameters], str]


@dataclass(frozen=True, slots=True)
class Family:
    """`{a}`, `{b}` and `{c}` in the templates stand for the first, second and third parameter."""

    name: str
    space: tuple[Parameters, ...]
    statement: str
    program: str
    wrong: tuple[str, ...]
    make_inputs: InputMaker
    solve: Solver


def fill(template: str, parameters: Parameters) -> str:
    """The template with its parameters written in."""
    return template.format(**dict(zip("abc", parameters, strict=False)))


# Parameter spaces and input makers.

NUM_TESTS = 10

# Syllables such as "lop". There are so many that a policy cannot memorise them and has to learn to copy.
WORDS = ["".join(letters) for letters in product("bdfgklmnprstvz", "aeiou", "bdgklmnprstx")]


def singles(values: range | str | list[str]) -> tuple[Parameters, ...]:
    """Tuples of one parameter each."""
    return tuple((value,) for value in values)


def pairs(first: Iterable[Parameter], second: Iterable[Parameter]) -> tuple[Parameters, ...]:
    """Every pair of two different values."""
    return tuple((left, right) for left, right in product(first, second) if left != right)


def ascending(first: range, second: range) -> tuple[Parameters, ...]:
    """Every pair (a, a + gap) with `a` from `first` and `gap` from `second`."""
    return tuple((low, low + gap) for low, gap in product(first, second))


def number(parameter: Parameter) -> int:
    """The parameter as an integer. Raises TypeError when it is a string."""
    if not isinstance(parameter, int):
        raise TypeError(f"expected an integer parameter, not {parameter!r}")
    return parameter


NUMBERS = singles(range(2, 100))
LETTERS = singles(ascii_lowercase)
LETTER_PAIRS = pairs(ascii_lowercase, ascii_lowercase)
WORD_SPACE = singles(WORDS[::3])


def distinct(candidates: list[str]) -> list[str]:
    """The first NUM_TESTS different inputs. Raises ValueError when there are fewer."""
    chosen = list(dict.fromkeys(candidates))[:NUM_TESTS]
    if len(chosen) < NUM_TESTS:
        raise ValueError(f"only {len(chosen)} different inputs")
    return chosen


def integers(low: int, high: int) -> InputMaker:
    """One integer per test: values near the numeric parameters that are within the bounds, then random ones."""

    def make(random: Random, parameters: Parameters) -> list[str]:
        near = [v for p in parameters if isinstance(p, int) for v in (p, p + 1, p - 1, p * p)]
        values = [v for v in near if low <= v <= high] + [low, low + 1]
        values += [random.randint(low, high) for _ in range(60)]
        return distinct([f"{value}\n" for value in values])

    return make


def integer_pairs(low: int, high: int) -> InputMaker:
    """Two integers on a line. Some sums equal the first parameter or differ from it by one."""

    def make(random: Random, parameters: Parameters) -> list[str]:
        rows: list[tuple[int, int]] = []
        for target in (number(parameters[0]) + d for d in (0, 1, -1)):
            left = random.randint(low, max(low, target))
            rows.append((left, target - left))
        rows += [(random.randint(low, high), random.randint(low, high)) for _ in range(40)]
        return distinct([f"{left} {right}\n" for left, right in rows])

    return make


def number_lists(low: int, high: int, shortest: int = 1) -> InputMaker:
    """A line of integers. Lists contain the numeric parameters, their neighbours and doubles, and repeated values."""

    def make(random: Random, parameters: Parameters) -> list[str]:
        special = [p for p in parameters if isinstance(p, int)]
        special = [v for p in special for v in (p, p, p + 1, p - 1, 2 * p) if low <= v <= high]
        rows: list[list[int]] = []
        for _ in range(40):
            row = [random.randint(low, high) for _ in range(random.randint(max(shortest, 3), shortest + 6))]
            row += random.sample(special, min(len(special), random.randint(1, 4)))
            row.append(random.choice(row))
            random.shuffle(row)
            rows.append(row)
        rows.insert(3, [random.randint(low, high) for _ in range(shortest)])
        return distinct([" ".join(map(str, row)) + "\n" for row in rows])

    return make


def word_lines(shortest: int, longest: int) -> InputMaker:
    """One lowercase word per test. Most words contain letters of the parameters, also at an end or repeated."""

    def make(random: Random, parameters: Parameters) -> list[str]:
        special = "".join(p for p in parameters if isinstance(p, str))
        rows: list[str] = []
        for index in range(40):
            letters = random.choices(ascii_lowercase, k=random.randint(shortest, longest))
            if special and index % 3:
                for _ in range(random.randint(1, 3)):
                    letters[random.randrange(len(letters))] = random.choice(special)
                letters[random.choice((0, -1))] = special[0]
            rows.append("".join(letters) + "\n")
        return distinct(rows)

    return make


def sentences(fewest: int, most: int) -> InputMaker:
    """Several words on a line, with repeats. Some lines contain the string parameters."""

    def make(random: Random, parameters: Parameters) -> list[str]:
        special = [p for p in parameters if isinstance(p, str) and len(p) > 1]
        rows: list[str] = []
        for index in range(40):
            words = random.choices(WORDS, k=random.randint(fewest, most))
            words += random.choices(special, k=index % 3) if special else []
            words.append(random.choice(words))
            random.shuffle(words)
            rows.append(" ".join(words) + "\n")
        return distinct(rows)

    return make


# Families that read a line of integers: sums, counting, sorting and filtering.

_RANKS = singles(range(2, 40))
_LIST = "a=list(map(int,input().split()))\n"


def _k(parameters: Parameters) -> int:
    return number(parameters[0])


def _values(text: str) -> list[int]:
    return [int(item) for item in text.split()]


def _lines(values: list[int]) -> str:
    return "\n".join(str(value) for value in values)


def _ordered(text: str) -> list[int]:
    """The numbers in order, sorted by insertion, so that the oracle does not use the same call as the program."""
    done: list[int] = []
    for value in _values(text):
        place = sum(other <= value for other in done)
        done.insert(place, value)
    return done


LISTS = (
    Family("total_plus", NUMBERS, "Read numbers. Print their sum plus {a}.", _LIST + "print(sum(a)+{a})",
           (_LIST + "print(sum(a)-{a})", _LIST + "print(len(a)+{a})"), number_lists(0, 99),
           lambda t, p: str(sum(_values(t), start=_k(p)))),
    Family("largest_times", NUMBERS, "Read numbers. Print the largest times {a}.", _LIST + "print(max(a)*{a})",
           (_LIST + "print(min(a)*{a})", _LIST + "print(max(a))"), number_lists(1, 99, 2),
           lambda t, p: str(_ordered(t)[-1] * _k(p))),
    Family("smallest_plus", NUMBERS, "Read numbers. Print the smallest plus {a}.", _LIST + "print(min(a)+{a})",
           (_LIST + "print(max(a)+{a})", _LIST + "print(min(a)-{a})"), number_lists(1, 99, 2),
           lambda t, p: str(_ordered(t)[0] + _k(p))),
    Family("sort_first", _RANKS, "Read numbers. Print the {a} smallest in order.", _LIST + "print(*sorted(a)[:{a}])",
           (_LIST + "print(*a[:{a}])", _LIST + "print(*sorted(a)[{a}:])"), number_lists(0, 99, 41),
           lambda t, p: " ".join(map(str, _ordered(t)[: _k(p)]))),
    Family("sort_last", _RANKS, "Read numbers. Print the {a} largest in order.", _LIST + "print(*sorted(a)[-{a}:])",
           (_LIST + "print(*a[-{a}:])", _LIST + "print(*sorted(a)[:{a}])"), number_lists(0, 150, 41),
           lambda t, p: " ".join(map(str, _ordered(t)[len(t.split()) - _k(p) :]))),
    Family("rank", _RANKS, "Read numbers. Print number {a} in sorted order.", _LIST + "print(sorted(a)[{a}-1])",
           (_LIST + "print(sorted(a)[{a}])", _LIST + "print(a[{a}-1])"), number_lists(0, 99, 41),
           lambda t, p: str(_ordered(t)[_k(p) - 1])),
    Family("sorted_scaled", NUMBERS, "Read numbers. Print them sorted, each times {a}.",
           _LIST + "for x in sorted(a):\n print(x*{a})",
           (_LIST + "for x in a:\n print(x*{a})", _LIST + "for x in sorted(a):\n print(x+{a})"), number_lists(0, 99, 3),
           lambda t, p: _lines([value * _k(p) for value in _ordered(t)])),
    Family("count_above", NUMBERS, "Read numbers. Count those above {a}.", _LIST + "print(sum(x>{a} for x in a))",
           (_LIST + "print(sum(x<{a} for x in a))", _LIST + "print(sum(x>={a} for x in a))"), number_lists(0, 120),
           lambda t, p: str(len([value for value in _values(t) if value >= _k(p) + 1]))),
    Family("count_below", NUMBERS, "Read numbers. Count those below {a}.", _LIST + "print(sum(x<{a} for x in a))",
           (_LIST + "print(sum(x>{a} for x in a))", _LIST + "print(sum(x<={a} for x in a))"), number_lists(0, 120),
           lambda t, p: str(len([value for value in _values(t) if value <= _k(p) - 1]))),
    Family("count_multiples", NUMBERS, "Read numbers. Count the multiples of {a}.",
           _LIST + "print(sum(x%{a}==0 for x in a))",
           (_LIST + "print(sum(x%{a} for x in a))", _LIST + "print(sum(x//{a}==0 for x in a))"), number_lists(0, 200),
           lambda t, p: str(len([value for value in _values(t) if value // _k(p) * _k(p) == value]))),
    Family("each_plus", NUMBERS, "Read numbers. Print each plus {a}.", _LIST + "for x in a:\n print(x+{a})",
           (_LIST + "for x in a:\n print(x-{a})", _LIST + "print(sum(a)+{a})"), number_lists(0, 99),
           lambda t, p: _lines([value + _k(p) for value in _values(t)])),
    Family("each_times", NUMBERS, "Read numbers. Print each times {a}.", _LIST + "for x in a:\n print(x*{a})",
           (_LIST + "for x in a:\n print(x+{a})", _LIST + "print(sum(a)*{a})"), number_lists(0, 99),
           lambda t, p: _lines([value * _k(p) for value in _values(t)])),
    Family("keep_above", NUMBERS, "Read numbers. Print those above {a}.",
           _LIST + "for x in a:\n if x>{a}:print(x)",
           (_LIST + "for x in a:\n if x<{a}:print(x)", _LIST + "for x in a:\n if x>={a}:print(x)"),
           number_lists(0, 120), lambda t, p: _lines([value for value in _values(t) if value - _k(p) >= 1])),
    Family("sum_above_list", NUMBERS, "Read numbers. Add up those above {a}.",
           _LIST + "print(sum(x for x in a if x>{a}))",
           (_LIST + "print(sum(x for x in a if x<{a}))", _LIST + "print(sum(x>{a} for x in a))"), number_lists(0, 120),
           lambda t, p: str(sum(value for value in _values(t) if value - _k(p) >= 1))),
    Family("count_value", NUMBERS, "Read numbers. Count how often {a} is there.", _LIST + "print(a.count({a}))",
           (_LIST + "print(a.index({a}))", _LIST + "print(len(a)-{a})"), number_lists(0, 120),
           lambda t, p: str(sum(value == _k(p) for value in _values(t)))),
    Family("is_member", NUMBERS, "Read numbers. Print yes if {a} is there, else no.",
           _LIST + "print('yes' if {a} in a else 'no')",
           (_LIST + "print('no' if {a} in a else 'yes')", _LIST + "print({a} in a)"), number_lists(0, 120),
           lambda t, p: "yes" if str(_k(p)) in t.split() else "no"),
    Family("spread", NUMBERS, "Read numbers. Print largest minus smallest plus {a}.",
           _LIST + "print(max(a)-min(a)+{a})",
           (_LIST + "print(max(a)+min(a)+{a})", _LIST + "print(max(a)-{a})"), number_lists(0, 99, 2),
           lambda t, p: str(_ordered(t)[-1] - _ordered(t)[0] + _k(p))),
    Family("different", NUMBERS, "Read numbers. Add up the different ones, plus {a}.",
           _LIST + "print(sum(set(a))+{a})",
           (_LIST + "print(sum(a)+{a})", _LIST + "print(sum(set(a))-{a})"), number_lists(0, 30, 3),
           lambda t, p: str(sum(dict.fromkeys(_values(t))) + _k(p))),
)  # fmt: skip


# Families that read one or two integers: arithmetic, conditions and loops.

_INT = "n=int(input())\n"
_READ_TWO = "x,y=map(int,input().split())\n"
_FACTORS = singles(range(2, 40))
_SMALL_PAIRS = pairs(range(2, 10), range(2, 100))


def _a(parameters: Parameters) -> int:
    return number(parameters[0])


def _b(parameters: Parameters) -> int:
    return number(parameters[1])


def _two(text: str) -> tuple[int, int]:
    left, right = text.split()
    return int(left), int(right)


def _yes(condition: bool) -> str:
    return "yes" if condition else "no"


def _times_in(value: int, divisor: int) -> int:
    return 0 if value % divisor else 1 + _times_in(value // divisor, divisor)


def _joined(values: range | list[int]) -> str:
    return " ".join(str(value) for value in values)


ARITHMETIC = (
    Family("plus", NUMBERS, "Read n. Print n plus {a}.", _INT + "print(n+{a})",
           (_INT + "print(n-{a})", _INT + "print(n)"), integers(0, 500), lambda t, p: str(int(t) + _a(p))),
    Family("times", NUMBERS, "Read n. Print n times {a}.", _INT + "print(n*{a})",
           (_INT + "print(n+{a})", _INT + "print(n**{a})"), integers(0, 99), lambda t, p: str(int(t) * _a(p))),
    Family("minus_from", NUMBERS, "Read n. Print {a} minus n.", _INT + "print({a}-n)",
           (_INT + "print(n-{a})",), integers(0, 200), lambda t, p: str(_a(p) - int(t))),
    Family("modulo", NUMBERS, "Read n. Print the rest of n by {a}.", _INT + "print(n%{a})",
           (_INT + "print(n//{a})", _INT + "print({a}%n)"), integers(1, 999), lambda t, p: str(int(t) % _a(p))),
    Family("divided", NUMBERS, "Read n. Print n divided by {a}.", _INT + "print(n//{a})",
           (_INT + "print(n/{a})", _INT + "print(n%{a})"), integers(100, 999),
           lambda t, p: str((int(t) - int(t) % _a(p)) // _a(p))),
    Family("linear", _SMALL_PAIRS, "Read n. Print n times {a} plus {b}.", _INT + "print(n*{a}+{b})",
           (_INT + "print(n*{a})", _INT + "print(n+{a}*{b})"), integers(2, 99),
           lambda t, p: str(int(t) * _a(p) + _b(p))),
    Family("square", NUMBERS, "Read n. Print n squared plus {a}.", _INT + "print(n*n+{a})",
           (_INT + "print(n+n+{a})", _INT + "print(n*n*{a})"), integers(0, 60),
           lambda t, p: str(int(t) ** 2 + _a(p))),
    Family("distance", NUMBERS, "Read n. Print how far n is from {a}.", _INT + "print(abs(n-{a}))",
           (_INT + "print(n-{a})", _INT + "print(abs(n+{a}))"), integers(0, 120),
           lambda t, p: str(max(int(t) - _a(p), _a(p) - int(t)))),
    Family("larger", NUMBERS, "Read n. Print the larger of n and {a}.", _INT + "print(max(n,{a}))",
           (_INT + "print(min(n,{a}))", _INT + "print(max(n,0))"), integers(0, 120),
           lambda t, p: str(sorted((int(t), _a(p)))[1])),
    Family("smaller", NUMBERS, "Read n. Print the smaller of n and {a}.", _INT + "print(min(n,{a}))",
           (_INT + "print(max(n,{a}))", _INT + "print(n)"), integers(0, 120),
           lambda t, p: str(sorted((int(t), _a(p)))[0])),
    Family("sum_plus", NUMBERS, "Read x and y. Print their sum plus {a}.", _READ_TWO + "print(x+y+{a})",
           (_READ_TWO + "print(x*y+{a})", _READ_TWO + "print(x+{a})"), integer_pairs(1, 99),
           lambda t, p: str(sum(_two(t)) + _a(p))),
    Family("product_minus", NUMBERS, "Read x and y. Print their product minus {a}.", _READ_TWO + "print(x*y-{a})",
           (_READ_TWO + "print(x*y+{a})", _READ_TWO + "print(x-{a})"), integer_pairs(1, 60),
           lambda t, p: str(_two(t)[0] * _two(t)[1] - _a(p))),
    Family("digit_sum", NUMBERS, "Read n. Print its digit sum plus {a}.", "n=input()\nprint(sum(map(int,n))+{a})",
           ("n=input()\nprint(len(n)+{a})", "n=input()\nprint(sum(map(int,n)))"), integers(10, 9999),
           lambda t, p: str(sum(int(digit) for digit in t.strip()) + _a(p))),
)  # fmt: skip

CONDITIONS = (
    Family("above", NUMBERS, "Read n. Print yes if n is above {a}, else no.", _INT + "print('yes' if n>{a} else 'no')",
           (_INT + "print('yes' if n<{a} else 'no')", _INT + "print('yes' if n>={a} else 'no')"), integers(0, 120),
           lambda t, p: _yes(int(t) >= _a(p) + 1)),
    Family("below", NUMBERS, "Read n. Print yes if n is below {a}, else no.", _INT + "print('yes' if n<{a} else 'no')",
           (_INT + "print('yes' if n>{a} else 'no')", _INT + "print('yes' if n<={a} else 'no')"), integers(0, 120),
           lambda t, p: _yes(int(t) <= _a(p) - 1)),
    Family("multiple", NUMBERS, "Read n. Print yes if {a} divides n, else no.",
           _INT + "print('yes' if n%{a}==0 else 'no')",
           (_INT + "print('yes' if n%{a}==1 else 'no')", _INT + "print('yes' if n//{a}==0 else 'no')"),
           integers(0, 300), lambda t, p: _yes(int(t) // _a(p) * _a(p) == int(t))),
    Family("within", ascending(range(2, 50), range(3, 50)), "Read n. Print yes if n is from {a} to {b}, else no.",
           _INT + "print('yes' if {a}<=n<={b} else 'no')",
           (_INT + "print('yes' if {a}<n<{b} else 'no')", _INT + "print('yes' if n<={b} else 'no')"),
           integers(0, 120), lambda t, p: _yes(int(t) in range(_a(p), _b(p) + 1))),
    Family("even_or_odd", NUMBERS, "Read n. Add {a} if n is even, else take {a} away.",
           _INT + "print(n-{a} if n%2 else n+{a})",
           (_INT + "print(n+{a} if n%2 else n-{a})", _INT + "print(n+{a})"), integers(0, 120),
           lambda t, p: str(int(t) + (1, -1)[int(t) % 2] * _a(p))),
    Family("sum_above", NUMBERS, "Read x and y. Print yes if their sum is above {a}, else no.",
           _READ_TWO + "print('yes' if x+y>{a} else 'no')",
           (_READ_TWO + "print('yes' if x+y<{a} else 'no')", _READ_TWO + "print('yes' if x+y>={a} else 'no')"),
           integer_pairs(0, 70), lambda t, p: _yes(sum(_two(t)) >= _a(p) + 1)),
    Family("capped", ascending(range(2, 50), range(3, 50)), "Read n. Print n kept between {a} and {b}.",
           _INT + "print(max({a},min(n,{b})))",
           (_INT + "print(min({a},max(n,{b})))", _INT + "print(min(n,{b}))"), integers(0, 120),
           lambda t, p: str(sorted((int(t), _a(p), _b(p)))[1])),
)  # fmt: skip

LOOPS = (
    Family("sum_to_n", NUMBERS, "Read n. Add up 1 to n, then times {a}.",
           _INT + "s=0\nfor i in range(n+1):\n s+=i\nprint(s*{a})",
           (_INT + "s=0\nfor i in range(n):\n s+=i\nprint(s*{a})",
            _INT + "s=0\nfor i in range(n+1):\n s+=i\nprint(s)"),
           integers(2, 60), lambda t, p: str(int(t) * (int(t) + 1) // 2 * _a(p))),
    Family("steps", NUMBERS, "Read n. Print 0 up to n in steps of {a}.", _INT + "print(*range(0,n+1,{a}))",
           (_INT + "print(*range(0,n,{a}))", _INT + "print(*range({a},n+1))"), integers(1, 200),
           lambda t, p: _joined([v for v in range(int(t) + 1) if v % _a(p) == 0])),
    Family("table", NUMBERS, "Read n. Print the first n multiples of {a}.",
           _INT + "for i in range(n):\n print(i*{a}+{a})",
           (_INT + "for i in range(n):\n print(i*{a})", _INT + "for i in range(n-1):\n print(i*{a}+{a})"),
           integers(1, 20), lambda t, p: "\n".join(str(_a(p) * i) for i in range(1, int(t) + 1))),
    Family("times_divisible", _FACTORS, "Read n. Print how often {a} divides n.",
           _INT + "c=0\nwhile n%{a}==0:\n n//={a}\n c+=1\nprint(c)",
           (_INT + "c=1\nwhile n%{a}==0:\n n//={a}\n c+=1\nprint(c)", _INT + "print(n//{a})"),
           integers(2, 5000), lambda t, p: str(_times_in(int(t), _a(p)))),
    Family("multiples_to_n", NUMBERS, "Read n. Count the multiples of {a} from 1 to n.",
           _INT + "c=0\nfor i in range(1,n+1):\n c+=i%{a}==0\nprint(c)",
           (_INT + "c=0\nfor i in range(1,n):\n c+=i%{a}==0\nprint(c)", _INT + "print(n%{a})"), integers(1, 300),
           lambda t, p: str(int(t) // _a(p))),
    Family("countdown", NUMBERS, "Read n. Count down from n plus {a} to 1.",
           _INT + "for i in range(n+{a},0,-1):\n print(i)",
           (_INT + "for i in range(n,0,-1):\n print(i)", _INT + "for i in range(n+{a},1,-1):\n print(i)"),
           integers(0, 30), lambda t, p: "\n".join(str(v) for v in reversed(range(1, int(t) + _a(p) + 1)))),
)  # fmt: skip


# Families that read a word or a line of words.

_WORD = "s=input()\n"
_WORDS = "w=input().split()\n"
_CUTS = singles(range(2, 40))


def _n(parameters: Parameters) -> int:
    return number(parameters[0])


def _swap(text: str, old: str, new: str) -> str:
    return "".join(new if letter == old else letter for letter in text)


STRINGS = (
    Family("repeat", NUMBERS, "Read a word. Print it {a} times.", _WORD + "print(s*{a})",
           (_WORD + "print(s+{a})", _WORD + "print(s*2*{a})"), word_lines(1, 6),
           lambda t, p: "".join(t.strip() for _ in range(_n(p)))),
    Family("count_letter", LETTERS, "Read a word. Count the letter '{a}'.", _WORD + "print(s.count('{a}'))",
           (_WORD + "print(s.find('{a}'))", _WORD + "print(len('{a}'))"), word_lines(2, 9),
           lambda t, p: str(sum(letter == p[0] for letter in t))),
    Family("replace", LETTER_PAIRS, "Read a word. Turn every '{a}' into '{b}'.",
           _WORD + "print(s.replace('{a}','{b}'))",
           (_WORD + "print(s.replace('{b}','{a}'))", _WORD + "print(s)"), word_lines(2, 9),
           lambda t, p: _swap(t.strip(), str(p[0]), str(p[1]))),
    Family("remove", LETTERS, "Read a word. Print it without the letter '{a}'.", _WORD + "print(s.replace('{a}',''))",
           (_WORD + "print(s.count('{a}'))", _WORD + "print(s)"), word_lines(3, 9),
           lambda t, p: "".join(letter for letter in t.strip() if letter != p[0])),
    Family("first_letters", _CUTS, "Read a word. Print its first {a} letters.", _WORD + "print(s[:{a}])",
           (_WORD + "print(s[{a}:])", _WORD + "print(s[{a}])"), word_lines(41, 44), lambda t, p: t[: _n(p)]),
    Family("last_letters", _CUTS, "Read a word. Print its last {a} letters.", _WORD + "print(s[-{a}:])",
           (_WORD + "print(s[{a}:])", _WORD + "print(s[-{a}])"), word_lines(41, 44),
           lambda t, p: t.strip()[len(t.strip()) - _n(p) :]),
    Family("drop_letters", _CUTS, "Read a word. Drop its first {a} letters.", _WORD + "print(s[{a}:])",
           (_WORD + "print(s[:{a}])", _WORD + "print(s[-{a}:])"), word_lines(41, 44), lambda t, p: t.strip()[_n(p) :]),
    Family("append", WORD_SPACE, "Read a word. Print it and then '{a}'.", _WORD + "print(s+'{a}')",
           (_WORD + "print('{a}'+s)", _WORD + "print(s,'{a}')"), word_lines(2, 7), lambda t, p: f"{t.strip()}{p[0]}"),
    Family("prepend", WORD_SPACE, "Read a word. Print '{a}' and then it.", _WORD + "print('{a}'+s)",
           (_WORD + "print(s+'{a}')", _WORD + "print('{a}',s)"), word_lines(2, 7), lambda t, p: f"{p[0]}{t.strip()}"),
    Family("contains", LETTERS, "Read a word. Print yes if it has the letter '{a}', else no.",
           _WORD + "print('yes' if '{a}' in s else 'no')",
           (_WORD + "print('no' if '{a}' in s else 'yes')", _WORD + "print('{a}' in s)"), word_lines(2, 9),
           lambda t, p: _yes(t.count(str(p[0])) > 0)),
    Family("starts_with", LETTERS, "Read a word. Print yes if it starts with '{a}', else no.",
           _WORD + "print('yes' if s[0]=='{a}' else 'no')",
           (_WORD + "print('yes' if s[1]=='{a}' else 'no')", _WORD + "print('yes' if s=='{a}' else 'no')"),
           word_lines(2, 6), lambda t, p: _yes(t.startswith(str(p[0])))),
    Family("length_plus", NUMBERS, "Read a word. Print its length plus {a}.", _WORD + "print(len(s)+{a})",
           (_WORD + "print(len(s))", _WORD + "print(len(s)-{a})"), word_lines(1, 16),
           lambda t, p: str(sum(1 for _ in t.strip()) + _n(p))),
    Family("capitals", WORD_SPACE, "Read a word. Print it in capitals, then '{a}'.", _WORD + "print(s.upper()+'{a}')",
           (_WORD + "print(s+'{a}')", _WORD + "print(s.lower()+'{a}')"), word_lines(2, 7),
           lambda t, p: "".join(chr(ord(letter) - 32) for letter in t.strip()) + str(p[0])),
    Family("backwards", LETTERS, "Read a word. Print it backwards, then '{a}'.", _WORD + "print(s[::-1]+'{a}')",
           (_WORD + "print(s[-1]+'{a}')", _WORD + "print(s+'{a}')"), word_lines(3, 8),
           lambda t, p: "".join(reversed(t.strip())) + str(p[0])),
    Family("find_letter", LETTERS, "Read a word. Print where '{a}' is first, or -1.", _WORD + "print(s.find('{a}'))",
           (_WORD + "print(s.count('{a}'))", _WORD + "print(s.index('{a}'))"), word_lines(3, 9),
           lambda t, p: str(next((i for i, letter in enumerate(t) if letter == p[0]), -1))),
    Family("join", LETTERS, "Read words. Join them with '{a}'.", _WORDS + "print('{a}'.join(w))",
           (_WORDS + "print(''.join(w))", _WORDS + "print('{a}',w)"), sentences(2, 5),
           lambda t, p: t.strip().replace(" ", str(p[0]))),
    Family("count_word", WORD_SPACE, "Read words. Count the word '{a}'.", _WORDS + "print(w.count('{a}'))",
           (_WORDS + "print(w.index('{a}'))", _WORDS + "print(len('{a}'))"), sentences(2, 5),
           lambda t, p: str(sum(word == p[0] for word in t.split()))),
    Family("word_lengths", NUMBERS, "Read words. Print each length plus {a}.",
           _WORDS + "for x in w:\n print(len(x)+{a})",
           (_WORDS + "for x in w:\n print(len(w)+{a})", _WORDS + "for x in w:\n print(len(x)-{a})"), sentences(4, 7),
           lambda t, p: "\n".join(str(len(word) + _n(p)) for word in t.split())),
)  # fmt: skip
