"""Demonstrations of proposals, so that the demo's policy can begin a self-play (docs/self-play.md)."""

from __future__ import annotations

from random import Random

from nouscoder.demo.noise import demonstrate
from nouscoder.demo.problems import DemoProblem
from nouscoder.self_play.judgement import proposal_text

PROPOSING_PROMPT = "Propose a problem.\n"  # self_play.prompt of configs/demo-self-play.toml
MOST_CHARS = 280
_NUM_INPUTS = 5


def can_be_proposed(problem: DemoProblem) -> bool:
    """Whether a proposal of the problem is short. Problems about the 40th number of a list need longer inputs."""
    return len(_text(problem, problem.program, _short_inputs(problem))) <= MOST_CHARS


def proposed(problem: DemoProblem, random: Random, *, noise: float) -> str:
    """A proposal of the problem. With probability `noise` its program has a mistake."""
    inputs = _short_inputs(problem)
    random.shuffle(inputs)
    return _text(problem, demonstrate(problem, random, noise=noise), inputs)


def _text(problem: DemoProblem, program: str, inputs: list[str]) -> str:
    return proposal_text(problem.statement, program, inputs)


def _short_inputs(problem: DemoProblem) -> list[str]:
    """The shortest inputs of the tests."""
    return sorted((case.input for case in problem.tests), key=len)[:_NUM_INPUTS]
