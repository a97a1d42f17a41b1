"""Mathematics and reasoning.

Math sets: a problem and its answer, compared by math-verify. The fields are those of MATH-500, DeepScaleR, AIME, GSM8K
and DAPO-Math: problem, question or prompt (text, or chat messages), and answer, final_answer, ground_truth,
reward_model.ground_truth or expected_answer. Without any of them, the answer is the last boxed one of `solution`, or
what follows #### (GSM8K).

Generated reasoning tasks, answered by a program that reads nothing and prints the answer: SymBench, BIG-Bench Hard and
Reasoning Gym. A row has a question (question, input or prompt) and the text of its answer (answer or target). BIG-Bench
Hard keeps its rows in `examples` of one object; a row may also be such an object's example.
"""

from __future__ import annotations

from nouscoder.data.importers.fields import (
    ANSWERS,
    QUESTIONS,
    Reason,
    Rejected,
    Row,
    asked_of,
    at_path,
    decoded,
    optional_text,
    text,
)
from nouscoder.data.importers.rows import Format, example_rows
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import MathCase, MathTests, StdinCase, StdinTests

ANSWER_TEMPLATE = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
_ANSWERS = ("answer", "final_answer", "ground_truth", "expected_answer", "Answer", "reward_model.ground_truth")
_MAX_ANSWER = 4000


def read_math(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    answer = _answer(row).strip()
    if not answer:
        raise Rejected(Reason.NO_ANSWER, "no field holds an answer, and the solution has no box")
    if len(answer) > _MAX_ANSWER:
        raise Rejected(Reason.TOO_LARGE, f"the answer has {len(answer)} characters")
    question, facts = asked_of(row, "problem", "question", "Problem", "prompt")
    problem = Problem(
        problem_id=optional_text(row, "unique_id", "problem_id", "id", "ID") or f"math-{number}",
        prompt=question,
        tests=MathTests((MathCase(answer),)),
        prompt_template=ANSWER_TEMPLATE,
        difficulty=optional_text(row, "level", "difficulty"),
        source=optional_text(row, "source", "data_source") or "math",
        family=optional_text(row, "subject", "type"),
    )
    return ReferencedProblem(problem, metadata=facts)


def _answer(row: Row) -> str:
    found = ""
    for name in _ANSWERS:
        value = at_path(row, name)
        match value:
            case [only]:  # OlympiadBench, Minerva
                value = only
        found = optional_text({name: value}, name)
        if found:
            break
        if not (value is None or value == [] or isinstance(value, str | float)):
            raise Rejected(Reason.NO_ANSWER, f"{name} is not one answer: {value!r:.60}")
    solution = optional_text(row, "solution", "Solution")
    if "####" in (said := found or solution):  # GSM8K, also with the answer in the solution alone
        return said.rpartition("####")[2].replace(",", "")
    return found or last_box(solution)


def last_box(solution: str) -> str:
    """What is inside the last box of LaTeX; empty when there is none, or its braces do not match."""
    begin = solution.rfind("\\boxed{")
    if begin < 0:
        return ""
    depth, begin = 1, begin + len("\\boxed{")
    for at in range(begin, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[at], 0)
        if depth == 0:
            return solution[begin:at]
    return ""


_REASONING_TEMPLATE = "{prompt}\n\nWrite a Python program that finds the answer and prints only the answer."


def read_reasoning(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    answer = optional_text(row, *ANSWERS)
    if not answer:
        raise Rejected(Reason.NO_ANSWER, "neither answer nor target has a value")
    problem = Problem(
        problem_id=optional_text(row, "id") or f"reasoning-{number}",
        prompt=text(row, *QUESTIONS),
        tests=StdinTests((StdinCase("", answer),)),
        prompt_template=_REASONING_TEMPLATE,
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


FORMATS = {
    "math": Format(read_math, "math sets: MATH-500, DeepScaleR, AIME, GSM8K, DAPO-Math"),
    "reasoning": Format(read_reasoning, "SymBench, BIG-Bench Hard, Reasoning Gym", example_rows),
}
