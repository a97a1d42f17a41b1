"""The record of a problem family: a statement, programs, an oracle and an input maker, all with parameters.

A family's `program` is a right answer and `wrong` holds wrong ones. `solve` computes the expected output independently
of the program, so that running the program against the tests checks both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

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
