"""What the warm start teaches: noisy demonstrations, proposals, and excerpts of right demonstrations.

With probability NOISE_PROBABILITY a noisy demonstration contains one mistake, else it is right. Most mistakes are of
kinds that all families share: a misspelt name, a dropped parenthesis, a missing int(), a result that is one too large,
a wrong variable. A policy that unlearns them on some problems therefore improves on all. The other mistakes are a wrong
operator and the family's own wrong programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from nouscoder.demo.family import Parameters
from nouscoder.demo.problems import FAMILY_BY_NAME, DemoProblem, prompt_of
from nouscoder.self_play.judgement import proposal_text

NOISE_PROBABILITY = 0.66
_OWN_SHARE = 0.15  # of the mistakes; the rest are of the shared kinds

_MISSPELT = {"input": "imput", "print": "pritn", "split": "splt", "sorted": "sortd", "range": "rnage", "count": "cuont"}
_OPERATORS = (("+", "-"), ("*", "+"), ("//", "%"), ("%", "*"), (">", "<"), ("<", ">"), ("==", "!="))

Mistake = Callable[[DemoProblem, Random], str | None]


def demonstrate(problem: DemoProblem, random: Random, *, noise: float = NOISE_PROBABILITY) -> str:
    """The right program, or with probability `noise` the program with one mistake in it."""
    if random.random() >= noise:
        return problem.program
    shared, own = (
        [text for mistake in kind if (text := mistake(problem, random)) is not None]
        for kind in (SHARED_MISTAKES, OWN_MISTAKES)
    )
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

PROPOSING_PROMPT = "Propose a problem.\n"  # self_play.prompt of configs/demo-self-play.toml
MOST_CHARS = 280
_NUM_INPUTS = 5


def can_be_proposed(problem: DemoProblem) -> bool:
    """Whether a proposal of the problem is short. Problems about the 40th number of a list need longer inputs."""
    return len(proposal_text(problem.statement, problem.program, _short_inputs(problem))) <= MOST_CHARS


def proposed(problem: DemoProblem, random: Random, *, noise: float) -> str:
    """A proposal of the problem. With probability `noise` its program has a mistake."""
    inputs = _short_inputs(problem)
    random.shuffle(inputs)
    return proposal_text(problem.statement, demonstrate(problem, random, noise=noise), inputs)


def _short_inputs(problem: DemoProblem) -> list[str]:
    return sorted((case.input for case in problem.tests), key=len)[:_NUM_INPUTS]


_PLACE = re.compile(r"\{([abc])\}")


def excerpt(problem: DemoProblem, width: int, random: Random) -> tuple[str, str, bool]:
    """A cut of the prompt and one of the program, both around the same parameter.

    Each end is at a random distance of at most `width` characters from the parameter. Returns (prompt cut, program cut,
    whether the program cut reaches the program's end).
    """
    family, prompt = FAMILY_BY_NAME[problem.family], prompt_of(problem)
    name, start, stop = random.choice(places(family.program, problem.parameters))
    asked_start, asked_stop = next(
        (begin, end) for other, begin, end in places(family.statement, problem.parameters) if other == name
    )
    prompt_cut = prompt[max(0, asked_start - random.randint(0, width)) : asked_stop + random.randint(0, width)]
    end = stop + random.randint(0, width)
    program_cut = problem.program[max(0, start - random.randint(0, width)) : end]
    return prompt_cut.rstrip("\n") + "\n", program_cut, end >= len(problem.program)


def places(template: str, parameters: Parameters) -> list[tuple[str, int, int]]:
    """The position of each parameter in the filled template: (name, start, stop) in characters."""
    values = dict(zip("abc", map(str, parameters), strict=False))
    found: list[tuple[str, int, int]] = []
    shift = 0
    for match in _PLACE.finditer(template):
        start, value = match.start() + shift, values[match[1]]
        found.append((match[1], start, start + len(value)))
        shift += len(value) - len(match[0])
    return found
