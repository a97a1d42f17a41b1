"""The options of every import: where a row's fields are, and what a problem gets that its data set does not say.

They are the options of `nouscoder data import`, and keys of an import that a recipe of a selection names. A row has its
columns renamed before it is read; the rest changes the problem that was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from nouscoder.data.importers.fields import Reason, Rejected, Row, at_path
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PROMPT, PromptForm, PromptSettings, PromptText, prompt_text
from nouscoder.domain.submission import (
    LANGUAGES,
    CallCase,
    CheckerTests,
    Comparator,
    ComparatorKind,
    InteractiveTests,
    Limits,
    MathTests,
    Profile,
    StdinCase,
    StdinTests,
    Tests,
    language_name,
)
from nouscoder.errors import Unusable, did_you_mean, why_unreadable
from nouscoder.formats.body import Body, first_fault
from nouscoder.formats.json_values import case_json
from nouscoder.input_file import regular

_FORMS = {"lcb": PromptForm.LIVECODEBENCH, **{form.value: form for form in PromptForm}}
_STARTER = "{starter_code}"
_SIZE = re.compile(r"([0-9]+)(?:([KMG])iB)?")
_UNITS = {None: 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_DATES = ("contest_date", "date")
_LEAST_MEMORY_BYTES = 8 * 1024**2  # no interpreter starts in less; a smaller number was meant in another unit


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
    memory_limit_bytes: int | None = Field(None, ge=_LEAST_MEMORY_BYTES, description="memory of each test")
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

    def applied(self, item: ReferencedProblem) -> ReferencedProblem:
        """The problem as the options want it. Raises Rejected for one outside the dates."""
        self._require_date(item)
        problem = item.problem
        is_neutral = isinstance(problem.tests, StdinTests | CheckerTests | InteractiveTests)
        if self.languages and is_neutral and not item.names_languages:
            problem = replace(problem, languages=tuple(self.languages))
        # The profile of a published grader has its own comparison, and Python alone.
        is_own = self.comparator or self.float_tolerance is not None or problem.languages != ("python",)
        changed = replace(
            self._asked(problem),
            comparator=self._comparator(problem.comparator),
            profile=Profile.PROCESS if is_own else problem.profile,
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
        """With its template. Starter code that is in the template is not asked for a second time.

        No form is taken where the tests ask for no program and no starter code names a function, such as mathematics:
        the problem keeps the template of its importer.
        """
        if not self.prompt:
            return problem
        code = problem.starter_code
        form = _FORMS.get(self.prompt)
        if form is PromptForm.PLAIN:
            return replace(problem, prompt_template="")
        asked = PromptText.of(replace(problem, prompt_template=""))
        if form is not None and PromptSettings(prompt_form=PromptForm.DEEPCODER).misleads(asked):
            return problem
        if form is None and _STARTER not in self.prompt:
            return replace(problem, prompt_template=self.prompt)
        if form is None:
            template = self.prompt.replace(_STARTER, code)
        else:
            template = prompt_text(form, PROMPT, code, problem.languages, tests_type=asked.tests_type)
        return replace(problem, prompt_template=template, starter_code="")

    def _comparator(self, found: Comparator) -> Comparator:
        if self.comparator is not None:
            found = replace(found, kind=ComparatorKind(self.comparator), entry_point="")
        if self.float_tolerance is not None:
            return replace(found, float_tolerance=0.0, absolute_tolerance=self.float_tolerance, relative_tolerance=0.0)
        return found

    def _limits(self, found: Limits) -> Limits:
        if self.time_limit_s is not None:
            found = replace(found, wall_time_s=self.time_limit_s, cpu_time_s=self.time_limit_s)
        return found if self.memory_limit_bytes is None else replace(found, memory_bytes=self.memory_limit_bytes)


class Columns:
    """The columns that `--column` names, perhaps inside another: which were found, and which fields were read."""

    def __init__(self, columns: Mapping[str, str], found: Iterable[str] = (), read: Iterable[str] = ()) -> None:
        self._columns = columns
        self.found = set(found)
        self.read = set(read)

    def of(self, row: Row) -> Row:
        """The row, its columns under the names of the format."""
        if not self._columns:
            return row
        given = {name: at_path(row, column) for name, column in self._columns.items()}
        self.found |= {name for name, value in given.items() if value is not None}
        return _Watched({**row, **given}, self.read)

    def fault(self) -> str:
        """What is wrong with the columns, after all rows were read; "" if nothing is."""
        for name, column in self._columns.items():
            if name not in self.found:
                return f"no row has the column {column} (--column {name}={column})"
            if name not in self.read:
                fields = sorted(self.read - self._columns.keys())
                near = did_you_mean(name, fields)
                return f"the format reads no field {name}{near}; it looked for {', '.join(fields)}"
        return ""


class _Watched(dict[str, Any]):
    """A row that notes which fields are read."""

    def __init__(self, row: Row, read: set[str]) -> None:
        super().__init__(row)
        self._read = read

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)


def _instant(date: str) -> datetime | None:
    """The instant of ISO text, which is in UTC where it names no time zone; None for another text."""
    try:
        found = datetime.fromisoformat(date)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


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
        return regular(Path(name)).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise WrongOption(
            f"--prompt {name} is none of {', '.join(_FORMS)} and no file with a template: {why_unreadable(error)}"
        ) from None


def columns_of(given: list[str]) -> dict[str, str]:
    """The fields and columns of texts such as prompt=question. Raises WrongOption."""
    pairs = [one.partition("=") for one in given]
    if not all(name and column for name, _, column in pairs):
        raise WrongOption(f"--column must be FIELD=COLUMN, such as prompt=question, not {', '.join(given)}")
    found = {name: column for name, _, column in pairs}
    if len(found) < len(pairs):
        raise WrongOption(f"--column names a field twice: {', '.join(given)}")
    return found


def options_given(prompt: str, memory_limit: str, columns: list[str], **others: Any) -> ImportOptions:
    """The options of a command. Raises WrongOption for a value that is refused."""
    if memory_limit:
        others["memory_limit_bytes"] = bytes_of(memory_limit)
    try:
        return ImportOptions(prompt=prompt_named(prompt), columns=columns_of(columns), **others)
    except ValidationError as error:
        field, wrong = first_fault(error)
        name = re.sub(r"_s$|_bytes$|\[.*", "", field).replace("_", "-")
        raise WrongOption(f"--{name}: {wrong}") from None
