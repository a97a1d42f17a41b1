"""Generated reasoning tasks, answered by a program: SymBench, BIG-Bench Hard and Reasoning Gym.

A row has a question (question, input or prompt) and the text of its answer (answer or target). BIG-Bench Hard keeps
its rows in `examples` of one object; a row may also be such an object's example. The program reads nothing and prints
the answer.
"""

from __future__ import annotations

from nouscoder.data.importers.fields import Row, decoded, optional_text, text
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests

_TEMPLATE = "{prompt}\n\nWrite a Python program that finds the answer and prints only the answer."


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    answer = optional_text(row, "answer", "target")
    if not answer:
        raise Rejected(Reason.NO_ANSWER, "neither answer nor target has a value")
    problem = Problem(
        problem_id=optional_text(row, "id") or f"reasoning-{number}",
        prompt=text(row, "question", "input", "prompt"),
        tests=StdinTests((StdinCase("", answer),)),
        prompt_template=_TEMPLATE,
        source="reasoning",
        family=_kind(row.get("metadata")) or optional_text(row, "task", "dataset"),
    )
    return ReferencedProblem(problem)


def _kind(metadata: object) -> str:
    """The generator that Reasoning Gym names in a record or its JSON; empty where there is none."""
    try:
        about = decoded(metadata)
    except Rejected:
        return ""
    return optional_text(about, "source_dataset") if isinstance(about, dict) else ""
