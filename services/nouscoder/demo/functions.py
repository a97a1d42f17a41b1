"""The problems of `nouscoder demo --real`: small Python functions, asked for in a sentence, with hidden tests.

A task says what a function returns. `{k}` in it is a constant, and a task with another constant is another problem of
the same task. The same task is asked for in several sentences and under several names.

INVARIANT: no task is both trained on and held out, with any constant, name or sentence. Two tasks with the same
arguments differ in at least one test of each. The same seed makes the same problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, pairwise, zip_longest
from random import Random
from typing import Any

from nouscoder.demo.problems import LIMITS, Split
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallCase, CallTests

NUM_TESTS = 20
_HELD_OUT_SHARE = 4  # one task in four is held out

NUMBERS, LETTERS = (2, 3, 4, 5, 6, 7, 8, 9, 10), tuple("aeionrst")
_NAMES = ("solve", "compute", "answer", "calc", "process", "transform", "evaluate", "run", "result", "f")
_SENTENCES = (
    "Write a Python function `{call}` that takes {takes} and returns {what}.",
    "Write the Python function `{call}`. It gets {takes} and must return {what}.",
    "Given {takes}, return {what}. Write it as a Python function `{call}`.",
)
_WORDS = (
    *("apple", "banana", "level", "code", "python", "queue", "stack", "noon", "river", "mountain", "tree", "of"),
    *("kayak", "Moon", "Ada", "seven", "treasure", "street"),
)


@dataclass(frozen=True, slots=True)
class Task:
    """`function` gets the arguments, and the constant if the text names one."""

    what: str
    function: Callable[..., Any]
    constants: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """Tasks with the same arguments. `draw` makes those of one test."""

    arguments: str
    takes: str
    draw: Callable[[Random], list[Any]]
    tasks: tuple[Task, ...]


def _integer(random: Random) -> list[Any]:
    return [random.randint(-2, 11) if random.random() < 0.9 else random.randint(-99, 99)]


def _pair(random: Random) -> list[Any]:
    first = random.randint(1, 12)
    return [first, random.choice((first, 2 * first, random.randint(1, 12), random.randint(1, 12)))]


def _list(random: Random) -> list[Any]:
    lowest = random.choice((-9, -9, 1))
    numbers = [random.randint(lowest, 10) for _ in range(random.randint(1, 8))]
    return [sorted(numbers) if random.random() < 0.3 else numbers]


def _text(random: Random) -> list[Any]:
    words = random.sample(_WORDS, random.randint(1, 3))
    return [" ".join(words) + random.choice(("", "", "s", "42", "!"))]


def _two_texts(random: Random) -> list[Any]:
    first = random.choice(_WORDS)
    return [first, random.choice((first, first[:2], first[-2:], first[1], first[::-1], random.choice(_WORDS)))]


def _words(random: Random) -> list[Any]:
    return [random.choices(_WORDS, k=random.randint(1, 5))]


_INTEGER = (
    Task("n multiplied by {k}", lambda n, k: n * k, NUMBERS),
    Task("n plus {k}", lambda n, k: n + k, NUMBERS),
    Task("n minus {k}", lambda n, k: n - k, NUMBERS),
    Task("{k} minus n", lambda n, k: k - n, NUMBERS),
    Task("True if n is divisible by {k}, otherwise False", lambda n, k: n % k == 0, NUMBERS[1:]),
    Task("the remainder of n divided by {k}", lambda n, k: n % k, NUMBERS[1:]),
    Task("n divided by {k}, rounded down to an integer", lambda n, k: n // k, NUMBERS),
    Task("the larger of n and {k}", lambda n, k: max(n, k), NUMBERS),
    Task("the smaller of n and {k}", lambda n, k: min(n, k), NUMBERS),
    Task("True if n is greater than {k}, otherwise False", lambda n, k: n > k, NUMBERS),
    Task("True if n is less than {k}, otherwise False", lambda n, k: n < k, NUMBERS),
    Task("the square of n", lambda n: n * n),
    Task("n to the power of 3", lambda n: n**3),
    Task("True if n is even, otherwise False", lambda n: n % 2 == 0),
    Task("True if n is odd, otherwise False", lambda n: n % 2 == 1),
    Task("the absolute value of n", abs),
    Task("n with the opposite sign", lambda n: -n),
    Task("True if n is negative, otherwise False", lambda n: n < 0),
    Task("n as a string", str),
    Task("the string 'even' if n is even, otherwise 'odd'", lambda n: "odd" if n % 2 else "even"),
    Task("the number of seconds in n minutes", lambda n: 60 * n),
    Task("the number of days in n weeks", lambda n: 7 * n),
    Task("1 if n is positive, -1 if it is negative, and 0 if it is zero", lambda n: (n > 0) - (n < 0)),
    Task("the list of n and its double", lambda n: [n, 2 * n]),
)
_POSITIVE = (
    Task("the sum of all integers from 1 to n", lambda n: n * (n + 1) // 2),
    Task("the sum of the squares of the integers from 1 to n", lambda n: sum(i * i for i in range(n + 1))),
    Task("the sum of the multiples of {k} from 1 to n", lambda n, k: sum(range(k, n + 1, k)), NUMBERS[:4]),
    Task("the factorial of n", math.factorial),
    Task("the list of the integers from 1 to n", lambda n: list(range(1, n + 1))),
    Task("the list of the integers from 0 to n - 1", lambda n: list(range(n))),
    Task("the list of the integers from n down to 1", lambda n: list(range(n, 0, -1))),
    Task("the list of the first n multiples of {k}", lambda n, k: [k * i for i in range(1, n + 1)], NUMBERS),
    Task("the list of the even integers from 1 to n", lambda n: list(range(2, n + 1, 2))),
    Task("the list of the squares of the integers from 1 to n", lambda n: [i * i for i in range(1, n + 1)]),
    Task("the list of all divisors of n in increasing order", lambda n: [i for i in range(1, n + 1) if n % i == 0]),
    Task("the number of divisors of n", lambda n: sum(n % i == 0 for i in range(1, n + 1))),
    Task("the number of decimal digits of n", lambda n: len(str(n))),
    Task("the sum of the decimal digits of n", lambda n: sum(map(int, str(n)))),
    Task("the list of the decimal digits of n", lambda n: [int(c) for c in str(n)]),
    Task("the last decimal digit of n", lambda n: n % 10),
    Task("n in binary as a string without a prefix", lambda n: f"{n:b}"),
    Task("the number of ones in the binary form of n", lambda n: f"{n:b}".count("1")),
    Task("True if n is a prime number, otherwise False", lambda n: n > 1 and all(n % i for i in range(2, n))),
    Task("the n-th Fibonacci number, where the first two are 1 and 1", lambda n: _fibonacci(n)),
    Task("2 to the power of n", lambda n: 2**n),
    Task("a string of n stars (*)", lambda n: "*" * n),
    Task("the integer with the digits of n in reverse order", lambda n: int(str(n)[::-1])),
)
_PAIR = (
    Task("their sum", lambda a, b: a + b),
    Task("a minus b", lambda a, b: a - b),
    Task("their product", lambda a, b: a * b),
    Task("the larger one", max),
    Task("the smaller one", min),
    Task("the sum of their squares", lambda a, b: a * a + b * b),
    Task("the square of their sum", lambda a, b: (a + b) ** 2),
    Task("their greatest common divisor", math.gcd),
    Task("their least common multiple", math.lcm),
    Task("the remainder of a divided by b", lambda a, b: a % b),
    Task("a divided by b, rounded down to an integer", lambda a, b: a // b),
    Task("the distance between them, which is never negative", lambda a, b: abs(a - b)),
    Task("True if they are equal, otherwise False", lambda a, b: a == b),
    Task("True if a is greater than b, otherwise False", lambda a, b: a > b),
    Task("True if a is divisible by b, otherwise False", lambda a, b: a % b == 0),
    Task("True if both are even, otherwise False", lambda a, b: a % 2 == 0 and b % 2 == 0),
    Task("a plus {k} times b", lambda a, b, k: a + k * b, NUMBERS),
    Task("{k} times their sum", lambda a, b, k: k * (a + b), NUMBERS[1:]),
    Task("the perimeter of a rectangle with sides a and b", lambda a, b: 2 * (a + b)),
    Task("the list of both in increasing order", lambda a, b: sorted((a, b))),
    Task("the list of b and then a", lambda a, b: [b, a]),
    Task("their average", lambda a, b: (a + b) / 2),
)
_LIST = (
    Task("their sum", sum),
    Task("their product", math.prod),
    Task("the largest one", max),
    Task("the smallest one", min),
    Task("how many there are", len),
    Task("the first one", lambda x: x[0]),
    Task("the last one", lambda x: x[-1]),
    Task("the list in reverse order", lambda x: x[::-1]),
    Task("the list sorted in increasing order", sorted),
    Task("the list sorted in decreasing order", lambda x: sorted(x, reverse=True)),
    Task("the list of the even ones, in the same order", lambda x: [i for i in x if i % 2 == 0]),
    Task("the list of the odd ones, in the same order", lambda x: [i for i in x if i % 2]),
    Task("the list of the positive ones, in the same order", lambda x: [i for i in x if i > 0]),
    Task("how many of them are negative", lambda x: sum(i < 0 for i in x)),
    Task("how many of them are even", lambda x: sum(i % 2 == 0 for i in x)),
    Task("how many of them are greater than {k}", lambda x, k: sum(i > k for i in x), NUMBERS[:5]),
    Task("how many of them are equal to {k}", lambda x, k: x.count(k), NUMBERS[:5]),
    Task("True if {k} is in the list, otherwise False", lambda x, k: k in x, NUMBERS[:5]),
    Task("the list of those that are less than {k}", lambda x, k: [i for i in x if i < k], NUMBERS[:5]),
    Task("the list with {k} added to each", lambda x, k: [i + k for i in x], NUMBERS),
    Task("the list with each multiplied by {k}", lambda x, k: [i * k for i in x], NUMBERS),
    Task("the list with {k} appended", lambda x, k: [*x, k], NUMBERS),
    Task("the list without the ones that are equal to {k}", lambda x, k: [i for i in x if i != k], NUMBERS[:5]),
    Task("the list of their squares", lambda x: [i * i for i in x]),
    Task("the list of their absolute values", lambda x: [abs(i) for i in x]),
    Task("the list of them as strings", lambda x: [str(i) for i in x]),
    Task("the number of distinct values", lambda x: len(set(x))),
    Task("the distinct values in increasing order", lambda x: sorted(set(x))),
    Task("the largest minus the smallest", lambda x: max(x) - min(x)),
    Task("the sum of the even ones", lambda x: sum(i for i in x if i % 2 == 0)),
    Task("the sum of the odd ones", lambda x: sum(i for i in x if i % 2)),
    Task("the sum of the positive ones", lambda x: sum(i for i in x if i > 0)),
    Task("the sum of their squares", lambda x: sum(i * i for i in x)),
    Task("the sum of the first and the last", lambda x: x[0] + x[-1]),
    Task("the list of the first {k}", lambda x, k: x[:k], NUMBERS[:4]),
    Task("the list of the last {k}", lambda x, k: x[-k:], NUMBERS[:4]),
    Task("the list without its first one", lambda x: x[1:]),
    Task("every second one, beginning with the first", lambda x: x[::2]),
    Task("True if all of them are positive, otherwise False", lambda x: all(i > 0 for i in x)),
    Task("True if any of them is negative, otherwise False", lambda x: any(i < 0 for i in x)),
    Task("True if the list is sorted in increasing order, otherwise False", lambda x: x == sorted(x)),
    Task("the position of the largest one, counted from 0", lambda x: x.index(max(x))),
    Task("the list of running totals", lambda x: list(accumulate(x))),
    Task("the list of the differences of each number to the next", lambda x: [b - a for a, b in pairwise(x)]),
    Task("the list followed by itself", lambda x: x + x),
    Task("their average", lambda x: sum(x) / len(x)),
)
_TEXT = (
    Task("it in reverse order", lambda s: s[::-1]),
    Task("its length", len),
    Task("it in upper case", str.upper),
    Task("it in lower case", str.lower),
    Task("its first character", lambda s: s[0]),
    Task("its last character", lambda s: s[-1]),
    Task("it without its first character", lambda s: s[1:]),
    Task("True if it is a palindrome, otherwise False", lambda s: s == s[::-1]),
    Task("the number of vowels (a, e, i, o, u) in it", lambda s: sum(c in "aeiou" for c in s)),
    Task("it without the vowels (a, e, i, o, u)", lambda s: "".join(c for c in s if c not in "aeiou")),
    Task("its first {k} characters", lambda s, k: s[:k], NUMBERS[:4]),
    Task("its last {k} characters", lambda s, k: s[-k:], NUMBERS[:4]),
    Task("it repeated {k} times", lambda s, k: s * k, NUMBERS),
    Task("how often the letter {k} occurs in it", lambda s, k: s.count(k), LETTERS),
    Task("it with every letter {k} removed", lambda s, k: s.replace(k, ""), LETTERS),
    Task("it with every letter {k} replaced by x", lambda s, k: s.replace(k, "x"), LETTERS),
    Task("True if it contains the letter {k}, otherwise False", lambda s, k: k in s, LETTERS),
    Task("the position of the first {k} in it, or -1 without one", lambda s, k: s.find(k), LETTERS),
    Task("the list of its characters", list),
    Task("it without spaces", lambda s: s.replace(" ", "")),
    Task("the list of its words", str.split),
    Task("the number of its words", lambda s: len(s.split())),
    Task("its first word", lambda s: s.split()[0]),
    Task("its longest word, the first of them if there are several", lambda s: max(s.split(), key=len)),
    Task("the number of distinct characters in it", lambda s: len(set(s))),
    Task("its characters in sorted order as a string", lambda s: "".join(sorted(s))),
    Task("the number of upper case letters in it", lambda s: sum(c.isupper() for c in s)),
    Task("every second character of it, beginning with the first", lambda s: s[::2]),
    Task("it followed by an exclamation mark", lambda s: s + "!"),
    Task("it between square brackets", lambda s: f"[{s}]"),
    Task("True if it is longer than {k} characters, otherwise False", lambda s, k: len(s) > k, (5, 7, 10)),
    Task("the number of digits in it", lambda s: sum(c.isdigit() for c in s)),
    Task("it with its words in reverse order, joined by spaces", lambda s: " ".join(s.split()[::-1])),
)
_TWO_TEXTS = (
    Task("a followed by b", lambda a, b: a + b),
    Task("b followed by a", lambda a, b: b + a),
    Task("both joined by a hyphen (-)", lambda a, b: f"{a}-{b}"),
    Task("True if they are equal, otherwise False", lambda a, b: a == b),
    Task("True if b occurs in a, otherwise False", lambda a, b: b in a),
    Task("True if a begins with b, otherwise False", lambda a, b: a.startswith(b)),
    Task("True if a ends with b, otherwise False", lambda a, b: a.endswith(b)),
    Task("the sum of their lengths", lambda a, b: len(a) + len(b)),
    Task("True if they have the same length, otherwise False", lambda a, b: len(a) == len(b)),
    Task("the longer one, and a if both are equally long", lambda a, b: b if len(b) > len(a) else a),
    Task("how often b occurs in a", lambda a, b: a.count(b)),
    Task("a with every occurrence of b removed", lambda a, b: a.replace(b, "")),
)
_WORD_LIST = (
    Task("all of them joined by spaces", " ".join),
    Task("all of them joined without anything between", "".join),
    Task("all of them joined by commas without spaces", ",".join),
    Task("the list of their lengths", lambda w: [len(s) for s in w]),
    Task("the sum of their lengths", lambda w: sum(map(len, w))),
    Task("the list of them in upper case", lambda w: [s.upper() for s in w]),
    Task("the list of their first characters", lambda w: [s[0] for s in w]),
    Task("the longest one, the first of them if there are several", lambda w: max(w, key=len)),
    Task("the length of the longest one", lambda w: max(map(len, w))),
    Task("the list of those longer than {k} characters", lambda w, k: [s for s in w if len(s) > k], (4, 5)),
    Task("the list of those that contain the letter {k}", lambda w, k: [s for s in w if k in s], LETTERS),
    Task("how many of them begin with the letter {k}", lambda w, k: sum(s[0] == k for s in w), tuple("snt")),
    Task("the list of each one reversed", lambda w: [s[::-1] for s in w]),
    Task("the list sorted by length, and otherwise in the same order", lambda w: sorted(w, key=len)),
    Task("the number of distinct words", lambda w: len(set(w))),
)

KINDS = (
    Kind("n", "an integer n", _integer, _INTEGER),
    Kind("n", "a positive integer n", lambda random: [random.randint(1, 30)], _POSITIVE),
    Kind("a, b", "two positive integers a and b", _pair, _PAIR),
    Kind("numbers", "a list of integers", _list, _LIST),
    Kind("text", "a string", _text, _TEXT),
    Kind("a, b", "two strings a and b", _two_texts, _TWO_TEXTS),
    Kind("words", "a list of words", _words, _WORD_LIST),
)


def _fibonacci(n: int) -> int:
    first, second = 0, 1
    for _ in range(n):
        first, second = second, first + second
    return first


def split_of(kind: Kind, task: Task) -> Split:
    """Whether the task is trained on or held out: by its digest, one in four is held out."""
    return Split.HELD_OUT if _digest(kind, task)[0] % _HELD_OUT_SHARE == 0 else Split.TRAIN


def _digest(kind: Kind, task: Task) -> bytes:
    return sha256(f"{kind.takes}/{task.what}".encode()).digest()


def function_problems(split: Split, num_problems: int, *, seed: int) -> tuple[Problem, ...]:
    """Different problems, from the tasks of this split in turn. Raises ValueError when there are fewer."""
    random = Random(f"{seed}/{split}/functions")
    tasks = [(kind, task) for kind in KINDS for task in kind.tasks if split_of(kind, task) is split]
    random.shuffle(tasks)
    of_tasks = [_problems_of(kind, task, seed) for kind, task in tasks]
    made = [each for turn in zip_longest(*of_tasks) for each in turn if each is not None]
    if len(made) < num_problems:
        raise ValueError(f"the {split} split has {len(made)} problems, fewer than the {num_problems} requested")
    return tuple(random.sample(made[:num_problems], num_problems))


def _problems_of(kind: Kind, task: Task, seed: int) -> list[Problem]:
    """Every pair of a constant and a sentence, in random order, each with a name and tests of its own."""
    digest = _digest(kind, task).hex()[:8]
    random = Random(f"{seed}/{digest}")
    asked = [(constant, sentence) for constant in task.constants or (None,) for sentence in _SENTENCES]
    made = []
    for number, (constant, sentence) in enumerate(random.sample(asked, len(asked))):
        name, what = random.choice(_NAMES), task.what.format(k=constant)
        made.append(
            Problem(
                problem_id=f"{digest}-{number:02d}",
                prompt=sentence.format(call=f"{name}({kind.arguments})", takes=kind.takes, what=what),
                tests=CallTests(name, cases_of(kind, task, constant, random)),
                limits=LIMITS,
                family=kind.takes,
            )
        )
    return made


def cases_of(kind: Kind, task: Task, constant: Any, random: Random) -> tuple[CallCase, ...]:
    """Tests with different arguments, for a task with this constant."""
    known = () if constant is None else (constant,)
    cases: dict[str, CallCase] = {}
    while len(cases) < NUM_TESTS:
        arguments = kind.draw(random)
        cases[repr(arguments)] = CallCase(tuple(arguments), expected=task.function(*arguments, *known))
    return tuple(cases.values())
