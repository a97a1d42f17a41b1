"""A problem: what the policy is asked, and what a program must do to be right."""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.domain.submission import Comparator, Limits, Tests


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable problem. `prompt` is the exact text the policy is given; `tests` are hidden from it.

    `text_is_code`: the policy's completion is the program itself, so nothing has to be extracted from an answer.
    """

    problem_id: str
    prompt: str
    tests: Tests
    limits: Limits = Limits()
    comparator: Comparator = Comparator()
    text_is_code: bool = False
    family: str = ""
