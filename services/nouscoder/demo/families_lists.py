"""Families that read a line of integers: sums, counting, sorting and filtering."""

from __future__ import annotations

from nouscoder.demo.family import Family, Parameters
from nouscoder.demo.spaces import NUMBERS, number, number_lists, singles

_RANKS = singles(range(2, 40))
_READ = "a=list(map(int,input().split()))\n"


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
    Family("total_plus", NUMBERS, "Read numbers. Print their sum plus {a}.", _READ + "print(sum(a)+{a})",
           (_READ + "print(sum(a)-{a})", _READ + "print(len(a)+{a})"), number_lists(0, 99),
           lambda t, p: str(sum(_values(t), start=_k(p)))),
    Family("largest_times", NUMBERS, "Read numbers. Print the largest times {a}.", _READ + "print(max(a)*{a})",
           (_READ + "print(min(a)*{a})", _READ + "print(max(a))"), number_lists(1, 99, 2),
           lambda t, p: str(_ordered(t)[-1] * _k(p))),
    Family("smallest_plus", NUMBERS, "Read numbers. Print the smallest plus {a}.", _READ + "print(min(a)+{a})",
           (_READ + "print(max(a)+{a})", _READ + "print(min(a)-{a})"), number_lists(1, 99, 2),
           lambda t, p: str(_ordered(t)[0] + _k(p))),
    Family("sort_first", _RANKS, "Read numbers. Print the {a} smallest in order.", _READ + "print(*sorted(a)[:{a}])",
           (_READ + "print(*a[:{a}])", _READ + "print(*sorted(a)[{a}:])"), number_lists(0, 99, 41),
           lambda t, p: " ".join(map(str, _ordered(t)[: _k(p)]))),
    Family("sort_last", _RANKS, "Read numbers. Print the {a} largest in order.", _READ + "print(*sorted(a)[-{a}:])",
           (_READ + "print(*a[-{a}:])", _READ + "print(*sorted(a)[:{a}])"), number_lists(0, 150, 41),
           lambda t, p: " ".join(map(str, _ordered(t)[len(t.split()) - _k(p) :]))),
    Family("rank", _RANKS, "Read numbers. Print number {a} in sorted order.", _READ + "print(sorted(a)[{a}-1])",
           (_READ + "print(sorted(a)[{a}])", _READ + "print(a[{a}-1])"), number_lists(0, 99, 41),
           lambda t, p: str(_ordered(t)[_k(p) - 1])),
    Family("sorted_scaled", NUMBERS, "Read numbers. Print them sorted, each times {a}.",
           _READ + "for x in sorted(a):\n print(x*{a})",
           (_READ + "for x in a:\n print(x*{a})", _READ + "for x in sorted(a):\n print(x+{a})"), number_lists(0, 99, 3),
           lambda t, p: _lines([value * _k(p) for value in _ordered(t)])),
    Family("count_above", NUMBERS, "Read numbers. Count those above {a}.", _READ + "print(sum(x>{a} for x in a))",
           (_READ + "print(sum(x<{a} for x in a))", _READ + "print(sum(x>={a} for x in a))"), number_lists(0, 120),
           lambda t, p: str(len([value for value in _values(t) if value >= _k(p) + 1]))),
    Family("count_below", NUMBERS, "Read numbers. Count those below {a}.", _READ + "print(sum(x<{a} for x in a))",
           (_READ + "print(sum(x>{a} for x in a))", _READ + "print(sum(x<={a} for x in a))"), number_lists(0, 120),
           lambda t, p: str(len([value for value in _values(t) if value <= _k(p) - 1]))),
    Family("count_multiples", NUMBERS, "Read numbers. Count the multiples of {a}.",
           _READ + "print(sum(x%{a}==0 for x in a))",
           (_READ + "print(sum(x%{a} for x in a))", _READ + "print(sum(x//{a}==0 for x in a))"), number_lists(0, 200),
           lambda t, p: str(len([value for value in _values(t) if value // _k(p) * _k(p) == value]))),
    Family("each_plus", NUMBERS, "Read numbers. Print each plus {a}.", _READ + "for x in a:\n print(x+{a})",
           (_READ + "for x in a:\n print(x-{a})", _READ + "print(sum(a)+{a})"), number_lists(0, 99),
           lambda t, p: _lines([value + _k(p) for value in _values(t)])),
    Family("each_times", NUMBERS, "Read numbers. Print each times {a}.", _READ + "for x in a:\n print(x*{a})",
           (_READ + "for x in a:\n print(x+{a})", _READ + "print(sum(a)*{a})"), number_lists(0, 99),
           lambda t, p: _lines([value * _k(p) for value in _values(t)])),
    Family("keep_above", NUMBERS, "Read numbers. Print those above {a}.",
           _READ + "for x in a:\n if x>{a}:print(x)",
           (_READ + "for x in a:\n if x<{a}:print(x)", _READ + "for x in a:\n if x>={a}:print(x)"),
           number_lists(0, 120), lambda t, p: _lines([value for value in _values(t) if value - _k(p) >= 1])),
    Family("sum_above_list", NUMBERS, "Read numbers. Add up those above {a}.",
           _READ + "print(sum(x for x in a if x>{a}))",
           (_READ + "print(sum(x for x in a if x<{a}))", _READ + "print(sum(x>{a} for x in a))"), number_lists(0, 120),
           lambda t, p: str(sum(value for value in _values(t) if value - _k(p) >= 1))),
    Family("count_value", NUMBERS, "Read numbers. Count how often {a} is there.", _READ + "print(a.count({a}))",
           (_READ + "print(a.index({a}))", _READ + "print(len(a)-{a})"), number_lists(0, 120),
           lambda t, p: str(sum(value == _k(p) for value in _values(t)))),
    Family("is_member", NUMBERS, "Read numbers. Print yes if {a} is there, else no.",
           _READ + "print('yes' if {a} in a else 'no')",
           (_READ + "print('no' if {a} in a else 'yes')", _READ + "print({a} in a)"), number_lists(0, 120),
           lambda t, p: "yes" if str(_k(p)) in t.split() else "no"),
    Family("spread", NUMBERS, "Read numbers. Print largest minus smallest plus {a}.",
           _READ + "print(max(a)-min(a)+{a})",
           (_READ + "print(max(a)+min(a)+{a})", _READ + "print(max(a)-{a})"), number_lists(0, 99, 2),
           lambda t, p: str(_ordered(t)[-1] - _ordered(t)[0] + _k(p))),
    Family("different", NUMBERS, "Read numbers. Add up the different ones, plus {a}.",
           _READ + "print(sum(set(a))+{a})",
           (_READ + "print(sum(a)+{a})", _READ + "print(sum(set(a))-{a})"), number_lists(0, 30, 3),
           lambda t, p: str(sum(dict.fromkeys(_values(t))) + _k(p))),
)  # fmt: skip
