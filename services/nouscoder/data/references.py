"""Problems with their reference solutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nouscoder.domain.problem import Problem


@dataclass(frozen=True, slots=True)
class Reference:
    """A program that is assumed to be right."""

    code: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class ReferencedProblem:
    """A problem, its reference solutions and other facts about it, such as contest_date, if any."""

    problem: Problem
    references: tuple[Reference, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
