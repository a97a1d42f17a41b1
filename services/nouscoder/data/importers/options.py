"""The options of every import: where a row's fields are, and what a problem gets that its data set does not say.

They are the options of `nouscoder data import`, and keys of an import that a recipe of a selection names. A row has its
columns renamed before it is read; the rest changes the problem that was read.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from nouscoder.data.importers.fields import Reason, Rejected, Row, at_path
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PROMPT, PromptForm, prompt_text
from nouscoder.domain.submission import (
    LANGUAGES,
    CallCase,
    CheckerTests,
    Comparator,
    ComparatorKind,
    InteractiveTests,
    Limits,
    MathTests,
    StdinCase,
    StdinTests,
    Tests,
    language_name,
)
from nouscoder.errors import Unusable, did_you_mean
from nouscoder.formats.body import Body, first_fault
from nouscoder.formats.json_values import case_json

_FORMS = {"lcb": PromptForm.LIVECODEBENCH, **{form.value: form for form in PromptForm}}
_STARTER = "{starter_code}"
_SIZE = re.compile(r"([0-9]+)(?:([KMG])iB)?")
_UNITS = {None: 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_DATES = ("contest_date", "date")


class WrongOption(Unusable):
    """An option of an import has no valid value. The message names it."""


class ImportOptions(Body):
    """See the module. Without options a problem stays as its importer made it."""

    prompt: str = Field(
        "",
        description="a template for each problem: that of a form (lcb is LiveCodeBench), plain (none), or a"
        " text with {prompt} and perhaps {starter_code}; empty: as the format says",
    )
    comparator: Literal["exact", "lines", "tokens", "unordered_lines", "kattis", "lcb"] | None = Field(
        None, description="how outputs are compared"
    )
    float_tolerance: float | None = Field(
        None, ge=0, description="allowed difference of two numbers, in place of the set's own tolerances; 0: none"
    )
    time_limit_s: float | None = Field(None, gt=0, description="seconds of each test")
    memory_limit_bytes: int | None = Field(None, gt=0, description="memory of each test")
    max_tests: int | None = Field(None, ge=1, description="tests kept of each problem: those with the longest inputs")
    after: str = Field("", description="problems of this day and later, by the date of their contest")
    before: str = Field("", description="problems from before this day")
    languages: list[str] = Field(
        [], description="languages of problems that name none, if programs in any language can be tested"
    )
    columns: dict[str, str] = Field({}, description="field of the format -> its column, such as reward_model.answer")

    @field_validator("prompt")
    @classmethod
    def _has_a_question(cls, value: str) -> str:
        if value and value not in _FORMS and PROMPT not in value:
            raise ValueError(f"must be {', '.join(_FORMS)} or a text with {PROMPT}")
        return value

    @field_validator("after", "before")
    @classmethod
    def _is_a_date(cls, value: str) -> str:
        if value and _instant(value) is None:
            raise ValueError(f"{value!r} is not a date such as 2024-08-01")
        return value

    @field_validator("languages")
    @classmethod
    def _are_known(cls, values: list[str]) -> list[str]:
        names = list(dict.fromkeys(map(language_name, values)))
        for name in names:
            if name not in LANGUAGES:
                raise ValueError(f"{name!r} is no language here{did_you_mean(name, LANGUAGES)}")
        return names

    def renamed(self, row: Row) -> Row:
        """The row, its columns under the names of the format. A column may be inside another: `extra_info.index`."""
        if not self.columns:
            return row
        return {**row, **{name: at_path(row, column) for name, column in self.columns.items()}}

    def applied(self, item: ReferencedProblem) -> ReferencedProblem:
        """The problem as the options want it. Raises Rejected for one outside the dates."""
        self._require_date(item)
        problem = replace(item.problem, languages=self._languages(item.problem))
        changed = replace(
            self._asked(problem),
            comparator=self._comparator(problem.comparator),
            limits=self._limits(problem.limits),
            tests=problem.tests if self.max_tests is None else _longest(problem.tests, self.max_tests),
        )
        return replace(item, problem=changed)

    def _require_date(self, item: ReferencedProblem) -> None:
        if not self.after and not self.before:
            return
        date = next((item.metadata[name] for name in _DATES if item.metadata.get(name)), "")
        at = _instant(date)
        if at is None:
            raise Rejected(Reason.NO_DATE, f"the row has no date of a contest: {date!r:.40}")
        since, until = _instant(self.after), _instant(self.before)
        if (since is not None and at < since) or (until is not None and at >= until):
            raise Rejected(Reason.OUTSIDE_DATES, f"its date is {date}")

    def _asked(self, problem: Problem) -> Problem:
        """With its template. Starter code that is in the template is not asked for a second time."""
        if not self.prompt:
            return problem
        code = problem.starter_code
        form = _FORMS.get(self.prompt)
        if form is PromptForm.PLAIN:
            return replace(problem, prompt_template="")
        if form is None and _STARTER not in self.prompt:
            return replace(problem, prompt_template=self.prompt)
        template = (
            self.prompt.replace(_STARTER, code) if form is None else prompt_text(form, PROMPT, code, problem.languages)
        )
        return replace(problem, prompt_template=template, starter_code="")

    def _comparator(self, found: Comparator) -> Comparator:
        if self.comparator is not None:
            found = replace(found, kind=ComparatorKind(self.comparator))
        if self.float_tolerance is not None:
            return Comparator(found.kind, absolute_tolerance=self.float_tolerance, ignore_case=found.ignore_case)
        return found

    def _limits(self, found: Limits) -> Limits:
        if self.time_limit_s is not None:
            found = replace(found, wall_time_s=self.time_limit_s, cpu_time_s=self.time_limit_s)
        return found if self.memory_limit_bytes is None else replace(found, memory_bytes=self.memory_limit_bytes)

    def _languages(self, problem: Problem) -> tuple[str, ...]:
        names_none = problem.languages == Problem("", "", problem.tests).languages
        is_neutral = isinstance(problem.tests, StdinTests | CheckerTests | InteractiveTests)
        return tuple(self.languages) if self.languages and names_none and is_neutral else problem.languages


def _instant(date: str) -> datetime | None:
    """The instant of ISO text without its time zone; None for another text."""
    try:
        return datetime.fromisoformat(date).replace(tzinfo=None)
    except ValueError:
        return None


def _longest(tests: Tests, most: int) -> Tests:
    """The tests with the longest inputs, longest first; of equally long ones the first.

    Source: rllm's code reward, which trains DeepCoder on 15 tests (rllm/rewards/code_reward.py).
    """
    if len(tests.cases) <= most or isinstance(tests, MathTests):
        return tests
    cases: Any = tests.cases
    chosen: Any = tuple(sorted(cases, key=_input_length, reverse=True)[:most])
    return replace(tests, cases=chosen)


def _input_length(case: object) -> int:
    if isinstance(case, StdinCase):
        return len(case.input)
    if isinstance(case, CallCase):
        return len(case_json(replace(case, expected=None)))
    return len(str(case))


# The options of the command.


def bytes_of(size: str) -> int:
    """The bytes of a size such as 4GiB, 512MiB or 1000000. Raises WrongOption."""
    found = _SIZE.fullmatch(size)
    if found is None:
        raise WrongOption(f"--memory-limit {size!r:.40} is no size such as 4GiB, 512MiB or a number of bytes")
    return int(found[1]) * _UNITS[found[2]]


def prompt_named(name: str) -> str:
    """The value of `prompt` for a form or a file with a template. Raises WrongOption."""
    if not name or name in _FORMS:
        return name
    try:
        return Path(name).read_text(encoding="utf8")
    except (OSError, ValueError) as error:
        raise WrongOption(
            f"--prompt {name} is none of {', '.join(_FORMS)} and no file with a template: {error}"
        ) from None


def columns_of(given: list[str]) -> dict[str, str]:
    """The fields and columns of texts such as prompt=question. Raises WrongOption."""
    found = dict(one.split("=", 1) for one in given if "=" in one)
    if len(found) != len(given) or not all(name and column for name, column in found.items()):
        raise WrongOption(f"--column must be FIELD=COLUMN, such as prompt=question, not {', '.join(given)}")
    return found


def options_given(prompt: str, memory_limit: str, columns: list[str], **others: Any) -> ImportOptions:
    """The options of a command. Raises WrongOption for a value that is refused."""
    if memory_limit:
        others["memory_limit_bytes"] = bytes_of(memory_limit)
    try:
        return ImportOptions(prompt=prompt_named(prompt), columns=columns_of(columns), **others)
    except ValidationError as error:
        field, wrong = first_fault(error)
        name = re.sub(r"_s$|\[.*", "", field).replace("_", "-")
        raise WrongOption(f"--{name}: {wrong}") from None
