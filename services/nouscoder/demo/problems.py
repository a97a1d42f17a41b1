"""The demo's problems: instances of the families, divided into a training and a held-out split.

INVARIANT: no instance (family and parameters) and no statement is in both splits, whatever the seeds. The split of an
instance depends only on its digest. The seed chooses which instances are drawn, and the inputs of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from hashlib import sha256
from random import Random

from nouscoder.demo.families import ARITHMETIC, CONDITIONS, LISTS, LOOPS, STRINGS
from nouscoder.demo.family import Family, Parameters, fill
from nouscoder.domain.submission import Limits, StdinCase

FAMILIES: tuple[Family, ...] = ARITHMETIC + CONDITIONS + LOOPS + STRINGS + LISTS
FAMILY_BY_NAME = {family.name: family for family in FAMILIES}
# A right program of the demo needs a few milliseconds. An endless one must not occupy a sandbox for long.
LIMITS = Limits(wall_time_s=2.0, cpu_time_s=1.0, memory_bytes=256 * 1024**2, output_bytes=64 * 1024, processes=8)
_HELD_OUT_SHARE = 5  # one instance in five is held out


class Split(StrEnum):
    """The two parts of the instances."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class DemoProblem:
    """One instance. `program` is a right answer. Each of `wrong_programs` must fail at least one test."""

    problem_id: str
    family: str
    statement: str
    program: str
    tests: tuple[StdinCase, ...]
    parameters: Parameters
    wrong_programs: tuple[str, ...]


def prompt_of(problem: DemoProblem) -> str:
    """The exact text of the prompt. The completion is the program, followed by eos."""
    return problem.statement + "\n"


def problems(split: Split, num_problems: int, *, seed: int) -> tuple[DemoProblem, ...]:
    """Different problems, from the families in turn. Raises ValueError when the split has fewer instances."""
    random = Random(f"{seed}/{split}/draw")
    queues = [(family, _shuffled(instances(family, split), random)) for family in FAMILIES]
    available = sum(len(queue) for _, queue in queues)
    if num_problems > available:
        raise ValueError(f"the {split} split has {available} instances, fewer than the {num_problems} requested")
    drawn: list[DemoProblem] = []
    while len(drawn) < num_problems:
        random.shuffle(queues)
        for family, queue in queues:
            if queue and len(drawn) < num_problems:
                drawn.append(build(family, queue.pop(), seed=seed))
    return tuple(drawn)


@cache
def instances(family: Family, split: Split) -> tuple[Parameters, ...]:
    """The parameter tuples of the family in this split. By its digest, every fifth one is held out."""
    ranked = sorted(family.space, key=lambda parameters: sha256(f"{family.name}/{parameters}".encode()).digest())
    cut = max(1, len(ranked) // _HELD_OUT_SHARE)
    return tuple(ranked[:cut] if split is Split.HELD_OUT else ranked[cut:])


def build(family: Family, parameters: Parameters, *, seed: int) -> DemoProblem:
    """The instance with its statement, programs and tests. The inputs depend on seed, family and parameters."""
    problem_id = "-".join((family.name, *map(str, parameters)))
    inputs = family.make_inputs(Random(f"{seed}/{problem_id}/inputs"), parameters)
    return DemoProblem(
        problem_id=problem_id,
        family=family.name,
        statement=fill(family.statement, parameters),
        program=fill(family.program, parameters),
        tests=tuple(StdinCase(text, family.solve(text, parameters) + "\n") for text in inputs),
        parameters=parameters,
        wrong_programs=tuple(fill(template, parameters) for template in family.wrong),
    )


def _shuffled(items: tuple[Parameters, ...], random: Random) -> list[Parameters]:
    return random.sample(items, len(items))
