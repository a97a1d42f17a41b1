"""Families that read one or two integers: arithmetic, conditions and loops."""

from __future__ import annotations

from nouscoder.demo.family import Family, Parameters
from nouscoder.demo.spaces import NUMBERS, ascending, integer_pairs, integers, number, pairs, singles

_READ = "n=int(input())\n"
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
    Family("plus", NUMBERS, "Read n. Print n plus {a}.", _READ + "print(n+{a})",
           (_READ + "print(n-{a})", _READ + "print(n)"), integers(0, 500), lambda t, p: str(int(t) + _a(p))),
    Family("times", NUMBERS, "Read n. Print n times {a}.", _READ + "print(n*{a})",
           (_READ + "print(n+{a})", _READ + "print(n**{a})"), integers(0, 99), lambda t, p: str(int(t) * _a(p))),
    Family("minus_from", NUMBERS, "Read n. Print {a} minus n.", _READ + "print({a}-n)",
           (_READ + "print(n-{a})",), integers(0, 200), lambda t, p: str(_a(p) - int(t))),
    Family("modulo", NUMBERS, "Read n. Print the rest of n by {a}.", _READ + "print(n%{a})",
           (_READ + "print(n//{a})", _READ + "print({a}%n)"), integers(1, 999), lambda t, p: str(int(t) % _a(p))),
    Family("divided", NUMBERS, "Read n. Print n divided by {a}.", _READ + "print(n//{a})",
           (_READ + "print(n/{a})", _READ + "print(n%{a})"), integers(100, 999),
           lambda t, p: str((int(t) - int(t) % _a(p)) // _a(p))),
    Family("linear", _SMALL_PAIRS, "Read n. Print n times {a} plus {b}.", _READ + "print(n*{a}+{b})",
           (_READ + "print(n*{a})", _READ + "print(n+{a}*{b})"), integers(2, 99),
           lambda t, p: str(int(t) * _a(p) + _b(p))),
    Family("square", NUMBERS, "Read n. Print n squared plus {a}.", _READ + "print(n*n+{a})",
           (_READ + "print(n+n+{a})", _READ + "print(n*n*{a})"), integers(0, 60),
           lambda t, p: str(int(t) ** 2 + _a(p))),
    Family("distance", NUMBERS, "Read n. Print how far n is from {a}.", _READ + "print(abs(n-{a}))",
           (_READ + "print(n-{a})", _READ + "print(abs(n+{a}))"), integers(0, 120),
           lambda t, p: str(max(int(t) - _a(p), _a(p) - int(t)))),
    Family("larger", NUMBERS, "Read n. Print the larger of n and {a}.", _READ + "print(max(n,{a}))",
           (_READ + "print(min(n,{a}))", _READ + "print(max(n,0))"), integers(0, 120),
           lambda t, p: str(sorted((int(t), _a(p)))[1])),
    Family("smaller", NUMBERS, "Read n. Print the smaller of n and {a}.", _READ + "print(min(n,{a}))",
           (_READ + "print(max(n,{a}))", _READ + "print(n)"), integers(0, 120),
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
    Family("above", NUMBERS, "Read n. Print yes if n is above {a}, else no.", _READ + "print('yes' if n>{a} else 'no')",
           (_READ + "print('yes' if n<{a} else 'no')", _READ + "print('yes' if n>={a} else 'no')"), integers(0, 120),
           lambda t, p: _yes(int(t) >= _a(p) + 1)),
    Family("below", NUMBERS, "Read n. Print yes if n is below {a}, else no.", _READ + "print('yes' if n<{a} else 'no')",
           (_READ + "print('yes' if n>{a} else 'no')", _READ + "print('yes' if n<={a} else 'no')"), integers(0, 120),
           lambda t, p: _yes(int(t) <= _a(p) - 1)),
    Family("multiple", NUMBERS, "Read n. Print yes if {a} divides n, else no.",
           _READ + "print('yes' if n%{a}==0 else 'no')",
           (_READ + "print('yes' if n%{a}==1 else 'no')", _READ + "print('yes' if n//{a}==0 else 'no')"),
           integers(0, 300), lambda t, p: _yes(int(t) // _a(p) * _a(p) == int(t))),
    Family("within", ascending(range(2, 50), range(3, 50)), "Read n. Print yes if n is from {a} to {b}, else no.",
           _READ + "print('yes' if {a}<=n<={b} else 'no')",
           (_READ + "print('yes' if {a}<n<{b} else 'no')", _READ + "print('yes' if n<={b} else 'no')"),
           integers(0, 120), lambda t, p: _yes(int(t) in range(_a(p), _b(p) + 1))),
    Family("even_or_odd", NUMBERS, "Read n. Add {a} if n is even, else take {a} away.",
           _READ + "print(n-{a} if n%2 else n+{a})",
           (_READ + "print(n+{a} if n%2 else n-{a})", _READ + "print(n+{a})"), integers(0, 120),
           lambda t, p: str(int(t) + (1, -1)[int(t) % 2] * _a(p))),
    Family("sum_above", NUMBERS, "Read x and y. Print yes if their sum is above {a}, else no.",
           _READ_TWO + "print('yes' if x+y>{a} else 'no')",
           (_READ_TWO + "print('yes' if x+y<{a} else 'no')", _READ_TWO + "print('yes' if x+y>={a} else 'no')"),
           integer_pairs(0, 70), lambda t, p: _yes(sum(_two(t)) >= _a(p) + 1)),
    Family("capped", ascending(range(2, 50), range(3, 50)), "Read n. Print n kept between {a} and {b}.",
           _READ + "print(max({a},min(n,{b})))",
           (_READ + "print(min({a},max(n,{b})))", _READ + "print(min(n,{b}))"), integers(0, 120),
           lambda t, p: str(sorted((int(t), _a(p), _b(p)))[1])),
)  # fmt: skip

LOOPS = (
    Family("sum_to_n", NUMBERS, "Read n. Add up 1 to n, then times {a}.",
           _READ + "s=0\nfor i in range(n+1):\n s+=i\nprint(s*{a})",
           (_READ + "s=0\nfor i in range(n):\n s+=i\nprint(s*{a})",
            _READ + "s=0\nfor i in range(n+1):\n s+=i\nprint(s)"),
           integers(2, 60), lambda t, p: str(int(t) * (int(t) + 1) // 2 * _a(p))),
    Family("steps", NUMBERS, "Read n. Print 0 up to n in steps of {a}.", _READ + "print(*range(0,n+1,{a}))",
           (_READ + "print(*range(0,n,{a}))", _READ + "print(*range({a},n+1))"), integers(1, 200),
           lambda t, p: _joined([v for v in range(int(t) + 1) if v % _a(p) == 0])),
    Family("table", NUMBERS, "Read n. Print the first n multiples of {a}.",
           _READ + "for i in range(n):\n print(i*{a}+{a})",
           (_READ + "for i in range(n):\n print(i*{a})", _READ + "for i in range(n-1):\n print(i*{a}+{a})"),
           integers(1, 20), lambda t, p: "\n".join(str(_a(p) * i) for i in range(1, int(t) + 1))),
    Family("times_divisible", _FACTORS, "Read n. Print how often {a} divides n.",
           _READ + "c=0\nwhile n%{a}==0:\n n//={a}\n c+=1\nprint(c)",
           (_READ + "c=1\nwhile n%{a}==0:\n n//={a}\n c+=1\nprint(c)", _READ + "print(n//{a})"),
           integers(2, 5000), lambda t, p: str(_times_in(int(t), _a(p)))),
    Family("multiples_to_n", NUMBERS, "Read n. Count the multiples of {a} from 1 to n.",
           _READ + "c=0\nfor i in range(1,n+1):\n c+=i%{a}==0\nprint(c)",
           (_READ + "c=0\nfor i in range(1,n):\n c+=i%{a}==0\nprint(c)", _READ + "print(n%{a})"), integers(1, 300),
           lambda t, p: str(int(t) // _a(p))),
    Family("countdown", NUMBERS, "Read n. Count down from n plus {a} to 1.",
           _READ + "for i in range(n+{a},0,-1):\n print(i)",
           (_READ + "for i in range(n,0,-1):\n print(i)", _READ + "for i in range(n+{a},1,-1):\n print(i)"),
           integers(0, 30), lambda t, p: "\n".join(str(v) for v in reversed(range(1, int(t) + _a(p) + 1)))),
)  # fmt: skip
