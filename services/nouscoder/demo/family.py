"""What a family of the demo's problems is, its parameter spaces, and the makers of its inputs.

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


def _makes_inputs(rows: Callable[..., list[str]]) -> Callable[..., InputMaker]:
    """A function of a source of random numbers, the parameters and settings becomes one of the settings."""

    def with_settings(*settings: int) -> InputMaker:
        return lambda random, parameters: distinct(rows(random, parameters, *settings))

    return with_settings


def distinct(candidates: list[str]) -> list[str]:
    """The first NUM_TESTS different inputs. Raises ValueError when there are fewer."""
    chosen = list(dict.fromkeys(f"{text}\n" for text in candidates))[:NUM_TESTS]
    if len(chosen) < NUM_TESTS:
        raise ValueError(f"only {len(chosen)} different inputs")
    return chosen


@_makes_inputs
def integers(random: Random, parameters: Parameters, low: int, high: int) -> list[str]:
    """One integer per test: values near the numeric parameters that are within the bounds, then random ones."""
    near = [v for p in parameters if isinstance(p, int) for v in (p, p + 1, p - 1, p * p)]
    values = [v for v in near if low <= v <= high] + [low, low + 1]
    return [str(value) for value in [*values, *(random.randint(low, high) for _ in range(60))]]


@_makes_inputs
def integer_pairs(random: Random, parameters: Parameters, low: int, high: int) -> list[str]:
    """Two integers on a line. Some sums equal the first parameter or differ from it by one."""
    rows: list[tuple[int, int]] = []
    for target in (number(parameters[0]) + d for d in (0, 1, -1)):
        left = random.randint(low, max(low, target))
        rows.append((left, target - left))
    rows += [(random.randint(low, high), random.randint(low, high)) for _ in range(40)]
    return [f"{left} {right}" for left, right in rows]


@_makes_inputs
def number_lists(random: Random, parameters: Parameters, low: int, high: int, shortest: int = 1) -> list[str]:
    """A line of integers. Lists contain the numeric parameters, their neighbours and doubles, and repeated values."""
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
    return [" ".join(map(str, row)) for row in rows]


@_makes_inputs
def word_lines(random: Random, parameters: Parameters, shortest: int, longest: int) -> list[str]:
    """One lowercase word per test. Most words contain letters of the parameters, also at an end or repeated."""
    special = "".join(p for p in parameters if isinstance(p, str))
    rows: list[str] = []
    for index in range(40):
        letters = random.choices(ascii_lowercase, k=random.randint(shortest, longest))
        if special and index % 3:
            for _ in range(random.randint(1, 3)):
                letters[random.randrange(len(letters))] = random.choice(special)
            letters[random.choice((0, -1))] = special[0]
        rows.append("".join(letters))
    return rows


@_makes_inputs
def sentences(random: Random, parameters: Parameters, fewest: int, most: int) -> list[str]:
    """Several words on a line, with repeats. Some lines contain the string parameters."""
    special = [p for p in parameters if isinstance(p, str) and len(p) > 1]
    rows: list[str] = []
    for index in range(40):
        words = random.choices(WORDS, k=random.randint(fewest, most))
        words += random.choices(special, k=index % 3) if special else []
        words.append(random.choice(words))
        random.shuffle(words)
        rows.append(" ".join(words))
    return rows
