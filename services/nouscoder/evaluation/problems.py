"""The problems of an evaluation: their prompts and facts, without their tests, and the window of their dates."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from nouscoder.data.problem_index import ProblemIndex
from nouscoder.data.problem_parquet import is_parquet, read_rows
from nouscoder.data.problems import read_bodies
from nouscoder.domain.problem import GradingRules
from nouscoder.domain.prompt import PYTHON, PromptSettings, PromptText
from nouscoder.domain.submission import Profile
from nouscoder.errors import Unusable

UNKNOWN = "unknown"
_HIGHEST_RATING = 10_000.0  # more is no rating of a problem
# LiveCodeBench v6 as NousCoder-14B reports it: 454 problems.
WINDOWS = {"lcb-v6": ("2024-08-01", "2025-05-01")}


class NothingToEvaluate(Unusable):
    """No problem can be evaluated as asked. The message says why."""


@dataclass(frozen=True, slots=True)
class EvaluatedProblem:
    """A problem without its tests. `date` is ISO text, or empty. `rating` is on the scale of Codeforces."""

    problem_id: str
    prompt: str
    prompt_template: str
    difficulty: str
    platform: str
    date: str
    tests_type: str
    tests_digest: str
    rules: GradingRules
    rating: float | None = None
    starter_code: str = ""
    languages: tuple[str, ...] = PYTHON

    @property
    def month(self) -> str:
        """The month, such as 2025-01."""
        return self.date[:7] or UNKNOWN


@dataclass(frozen=True, slots=True)
class Window:
    """Dates from `since` to `until`, both as ISO text, both inclusive, empty for no bound.

    As in LiveCodeBench a day without a time is its first instant, so a contest later on the last day is outside.
    """

    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        """Raises NothingToEvaluate for a bound that is not a date."""
        for bound in (self.since, self.until):
            if bound:
                _instant(bound)
        if self.since and self.until and _instant(self.until) < _instant(self.since):
            raise NothingToEvaluate(f"no date is from {self.since} to {self.until}")

    def holds(self, date: str) -> bool:
        """Whether the date is inside. Without bounds every date is, also an unknown one."""
        if not self.since and not self.until:
            return True
        if not date:
            return False
        instant = _instant(date)
        return (not self.since or _instant(self.since) <= instant) and (
            not self.until or instant <= _instant(self.until)
        )


def window_named(name: str) -> Window:
    """One of WINDOWS. Raises NothingToEvaluate."""
    if name not in WINDOWS:
        raise NothingToEvaluate(f"--window {name!r} is none of {', '.join(WINDOWS)}")
    return Window(*WINDOWS[name])


def read_evaluated(
    path: Path, index: ProblemIndex, window: Window, *, all_tests: bool = False
) -> list[EvaluatedProblem]:
    """The file's problems inside the window, in order; `all_tests`: every test is run. Raises NothingToEvaluate."""
    found = [problem for problem in _all(path, index) if window.holds(problem.date)]
    if all_tests:
        found = [replace(one, rules=replace(one.rules, run_all_tests=True)) for one in found]
    if not found:
        raise NothingToEvaluate(f"{path} has no problem dated from {window.since or '...'} to {window.until or '...'}")
    return found


def check_profile(problems: list[EvaluatedProblem], profile: Profile) -> None:
    """Raises NothingToEvaluate when the profile does not apply to a problem."""
    if not profile.is_lcb:
        return
    for problem in problems:
        if problem.languages != PYTHON:
            raise NothingToEvaluate(
                f"--profile {profile} grades only python, but {problem.problem_id} is for"
                f" {', '.join(problem.languages)}"
            )
        if problem.tests_type not in ("stdin", "call"):
            raise NothingToEvaluate(
                f"--profile lcb grades stdin and call tests, but {problem.problem_id} has {problem.tests_type} tests"
            )


def gradable(problems: list[EvaluatedProblem], languages: Collection[str]) -> tuple[list[EvaluatedProblem], str]:
    """The problems in languages of the verifier, and a sentence about the others. Raises NothingToEvaluate for none."""
    left = [problem for problem in problems if set(problem.languages) <= set(languages)]
    if len(left) == len(problems):
        return problems, ""
    lacking = sorted({name for problem in problems for name in problem.languages} - set(languages))
    others = f"{len(problems) - len(left)} of {len(problems)} problems"
    if not left:
        raise NothingToEvaluate(f"no problem is left: {others} allow {', '.join(lacking)}, which the verifier lacks")
    return left, f"{others} are left out: they allow {', '.join(lacking)}, which the verifier lacks"


def check_prompt(problems: list[EvaluatedProblem], settings: PromptSettings) -> None:
    """Raises NothingToEvaluate when the form of the prompt would ask for another program than the tests do."""
    for problem in problems:
        if settings.misleads(PromptText.of(problem)):
            raise NothingToEvaluate(
                f"the form {settings.prompt_form} needs starter code for {problem.problem_id}, which has"
                f" {problem.tests_type} tests: import the set again, or give --prompt plain"
            )


def _all(path: Path, index: ProblemIndex) -> Iterator[EvaluatedProblem]:
    if is_parquet(path):
        for row in read_rows(path):
            yield _problem(index, row.values, row.values["tests_type"], json.loads(row.values["metadata"]))
        return
    for body in read_bodies(path):
        values = {"problem_id": body.problem_id, "difficulty": body.difficulty, "source": body.source}
        yield _problem(index, values, body.tests.type, body.metadata)


def _problem(
    index: ProblemIndex, values: dict[str, Any], tests_type: str, metadata: dict[str, str]
) -> EvaluatedProblem:
    known = index.problem(values["problem_id"])
    same = ("problem_id", "prompt", "prompt_template", "tests_digest", "rules", "starter_code", "languages")
    return EvaluatedProblem(
        **{name: getattr(known, name) for name in same},
        difficulty=values["difficulty"] or UNKNOWN,
        platform=metadata.get("platform") or values["source"] or UNKNOWN,
        date=metadata.get("contest_date") or metadata.get("date") or "",
        tests_type=tests_type,
        rating=rating_of(metadata),
    )


def rating_of(metadata: dict[str, str]) -> float | None:
    """The rating of a problem; None when none is known. CodeContests has 0 for a problem without one."""
    try:
        rating = float(metadata.get("rating") or metadata.get("cf_rating") or "")
    except ValueError:
        return None
    return rating if 0.0 < rating <= _HIGHEST_RATING else None


def _instant(date: str) -> datetime:
    try:
        return datetime.fromisoformat(date).replace(tzinfo=None)
    except ValueError:
        raise NothingToEvaluate(f"{date!r} is not a date such as 2024-08-01") from None
