"""Completions that continue a prompt of code, as sample files of HumanEval and EvalPlus have them."""

from __future__ import annotations

import ast
from functools import lru_cache

_MOST_KEPT = 256


def continued_program(prompt: str, completion: str) -> str | None:
    """The prompt and the completion as one program; None for a completion that is an answer.

    It continues the prompt when the prompt is Python that defines a function, and the completion is the function's
    body: it begins with an indented line, and has no fence.
    """
    first = next((line for line in completion.splitlines() if line.strip()), "")
    if not first[:1].isspace() or "```" in completion or not _defines_a_function(prompt):
        return None
    return prompt + completion


@lru_cache(_MOST_KEPT)
def _defines_a_function(prompt: str) -> bool:
    try:
        return any(isinstance(node, ast.FunctionDef) for node in ast.parse(prompt).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
