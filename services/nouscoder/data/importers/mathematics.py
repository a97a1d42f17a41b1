"""Math sets: a problem and its answer, compared by math-verify.

The fields are those of MATH-500, DeepScaleR, AIME, GSM8K and DAPO-Math: problem, question or prompt (text, or chat
messages), and answer, final_answer, ground_truth, reward_model.ground_truth or expected_answer. Without any of them,
the answer is the last boxed one of `solution`, or what follows #### (GSM8K).
"""

from __future__ import annotations

from typing import Any

from nouscoder.data.importers.fields import Row, optional_text, text
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import MathCase, MathTests

_TEMPLATE = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
_MAX_ANSWER = 4000


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    answer = _answer(row).strip()
    if not answer:
        raise Rejected(Reason.NO_ANSWER, "no field holds an answer, and the solution has no box")
    if len(answer) > _MAX_ANSWER:
        raise Rejected(Reason.TOO_LARGE, f"the answer has {len(answer)} characters")
    problem = Problem(
        problem_id=optional_text(row, "unique_id", "problem_id", "id", "ID") or f"math-{number}",
        prompt=_question(row),
        tests=MathTests((MathCase(answer),)),
        prompt_template=_TEMPLATE,
        difficulty=optional_text(row, "level", "difficulty"),
        source=optional_text(row, "source", "data_source") or "math",
        family=optional_text(row, "subject", "type"),
    )
    return ReferencedProblem(problem)


def _question(row: Row) -> str:
    messages = row.get("prompt")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        return text(messages[-1], "content")
    return text(row, "problem", "question", "Problem", "prompt")


def _answer(row: Row) -> str:
    model: Any = row.get("reward_model") or {}
    found = optional_text(row, "answer", "final_answer", "ground_truth", "expected_answer", "Answer")
    found = found or (optional_text(model, "ground_truth") if isinstance(model, dict) else "")
    if "####" in found:
        return found.rpartition("####")[2].replace(",", "")
    return found or last_box(optional_text(row, "solution", "Solution"))


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
