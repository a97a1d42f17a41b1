"""Noisy demonstrations: with probability NOISE_PROBABILITY a demonstration contains one mistake, else it is right.

Most mistakes are of kinds that all families share: a misspelt name, a dropped parenthesis, a missing int(), a result
that is one too large, a wrong variable. A policy that unlearns them on some problems therefore improves on all. The
other mistakes are a wrong operator and the family's own wrong programs.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from nouscoder.demo.problems import DemoProblem

NOISE_PROBABILITY = 0.66
_OWN_SHARE = 0.15  # of the mistakes; the rest are of the shared kinds

_MISSPELT = {"input": "imput", "print": "pritn", "split": "splt", "sorted": "sortd", "range": "rnage", "count": "cuont"}
_OPERATORS = (("+", "-"), ("*", "+"), ("//", "%"), ("%", "*"), (">", "<"), ("<", ">"), ("==", "!="))

Mistake = Callable[[DemoProblem, Random], str | None]


def demonstrate(problem: DemoProblem, random: Random, *, noise: float = NOISE_PROBABILITY) -> str:
    """The right program, or with probability `noise` the program with one mistake in it."""
    if random.random() >= noise:
        return problem.program
    shared = [text for text in (mistake(problem, random) for mistake in SHARED_MISTAKES) if text is not None]
    own = [text for text in (mistake(problem, random) for mistake in OWN_MISTAKES) if text is not None]
    return random.choice(own if random.random() < _OWN_SHARE else shared)


def _misspelt_name(problem: DemoProblem, random: Random) -> str | None:
    names = [name for name in _MISSPELT if name in problem.program]
    name = random.choice(names)
    return problem.program.replace(name, _MISSPELT[name], 1)


def _dropped_parenthesis(problem: DemoProblem, random: Random) -> str | None:
    head, closing, tail = problem.program.rpartition(")")
    return head + tail if closing else None


def _forgotten_conversion(problem: DemoProblem, random: Random) -> str | None:
    for conversion, raw in (("int(input())", "input()"), ("list(map(int,input().split()))", "input().split()"),
                            ("map(int,input().split())", "input().split()")):  # fmt: skip
        if conversion in problem.program:
            return problem.program.replace(conversion, raw)
    return None


def _one_too_many(problem: DemoProblem, random: Random) -> str | None:
    return problem.program[:-1] + "+1)" if problem.program.endswith(")") else None


def _wrong_variable(problem: DemoProblem, random: Random) -> str | None:
    head, call, tail = problem.program.rpartition("print(")
    return f"{head}{call}z{tail[1:]}" if tail[0].isalpha() and not tail[1].isalpha() else None


def _wrong_operator(problem: DemoProblem, random: Random) -> str | None:
    head, newline, body = problem.program.partition("\n")
    for right, wrong in _OPERATORS:
        if right in body:
            return head + newline + body.replace(right, wrong, 1)
    return None


def _wrong_variant(problem: DemoProblem, random: Random) -> str | None:
    return random.choice(problem.wrong_programs)


SHARED_MISTAKES: tuple[Mistake, ...] = (
    _misspelt_name,
    _dropped_parenthesis,
    _forgotten_conversion,
    _one_too_many,
    _wrong_variable,
)
OWN_MISTAKES: tuple[Mistake, ...] = (_wrong_operator, _wrong_variant)
MISTAKES = SHARED_MISTAKES + OWN_MISTAKES
