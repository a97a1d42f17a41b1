"""Excerpts of right demonstrations. The warm start trains on them first, with growing width.

A small policy learns the form of the programs in seconds, but takes long to learn that it must copy a parameter from
the statement, because it must attend to one character of about forty. An excerpt has few characters around the
parameter, so the policy learns to copy there first and then in wider excerpts.
"""

from __future__ import annotations

import re
from random import Random

from nouscoder.demo.family import Parameters
from nouscoder.demo.problems import FAMILY_BY_NAME, DemoProblem, prompt_of

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
