"""Problem files: JSONL, one problem per line, plain or compressed (.gz, .zst).

Tests have the grading API's JSON form, or a public form that it takes too, such as {"inputs": [...], "outputs": [...]}.
`task_id` may stand for `problem_id`. `nouscoder data schema` prints the format.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import to_json

from nouscoder.atomic_files import naming_storage_faults, whole_or_gone
from nouscoder.data.bounded_files import FileRefused, bounded_lines, created, opened
from nouscoder.data.json_records import bounded_json
from nouscoder.domain.problem import Problem, language_fault
from nouscoder.domain.prompt import PROMPT
from nouscoder.domain.submission import Prelude, Profile, Submission, Tests, language_name
from nouscoder.errors import Unusable, did_you_mean, one_line
from nouscoder.formats.body import Body, ComparatorBody, LimitsBody, TestsBody, all_faults, canonical_json
from nouscoder.formats.json_values import RepeatedKey, TooManyValues, ValueCount, json_weight
from nouscoder.formats.public_shapes import NotTests, rewritten
from nouscoder.input_file import regular

# Public tests travel with each task.
MAX_PUBLIC_BYTES = 16 * 1024
_SNIFFED_BYTES = 4 * 1024**2
_MOST_SHOWN = 4  # faults of one line
_TEXTS = ("problem_id", "prompt", "prompt_template", "difficulty", "source", "family", "starter_code")
_ORDER = (
    *("problem_id", "prompt", "limits", "comparator", "prelude", "profile", "text_is_code", "prompt_template"),
    *("difficulty", "source", "family", "starter_code", "languages", "libraries"),
)


class ProblemFileError(Unusable):
    """A problem file cannot be used. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class FileFault:
    """A fault of a problem, which `where` names: its problem_id, or the line when that cannot be read."""

    where: str
    fault: str
    is_of_line: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.fault}"


class ReferenceBody(Body):
    """A reference solution: a program that is assumed to be right."""

    code: str
    language: str = "python"


class ProblemBody(Body):
    """One line of a problem file."""

    problem_id: str = Field(min_length=1, max_length=200, description="unique in the file")
    prompt: str = Field(description="what the policy is asked")
    tests: TestsBody = Field(description="what a program, or an answer, must fulfil; the policy never sees it")
    public_tests: TestsBody | None = Field(
        None,
        description="examples that the policy may see with their expected outputs, for environments with feedback;"
        f" at most {MAX_PUBLIC_BYTES} bytes of JSON",
    )
    limits: LimitsBody = Field(LimitsBody(), description="bounds on each test")
    comparator: ComparatorBody = Field(ComparatorBody(), description="how outputs are compared")
    prelude: Literal["none", "lcb"] = Field(
        "none", description="what runs before a python program; lcb: LiveCodeBench's imports and recursion limit"
    )
    profile: Literal["process", "lcb"] = Field(
        "process", description="process: each test is a real process; lcb: as LiveCodeBench's published grader judges"
    )
    text_is_code: bool = Field(
        False, description="the completion is the program itself; else the code is its last fenced block"
    )
    prompt_template: str = Field("", description="text around {prompt} for this problem; empty: the environment's own")
    starter_code: str = Field("", description="what a program must begin with, such as the head of a class")
    languages: list[str] = Field(
        ["python"],
        min_length=1,
        description="languages that a program may be in; the first is meant where an answer names none",
    )
    libraries: list[str] = Field(
        [], description="modules that a program needs beyond Python's standard library, by the names of their imports"
    )
    difficulty: str = Field("", description="for statistics")
    source: str = Field("", description="for statistics: the data set")
    family: str = Field("", description="for statistics: pass@1 is reported for each family")
    references: list[str | ReferenceBody] = Field([], description="reference solutions, for the audit of the tests")
    metadata: dict[str, str] = Field({}, description="other facts, such as contest_date, platform and rating")

    @field_validator("public_tests")
    @classmethod
    def _small(cls, tests: TestsBody | None) -> TestsBody | None:
        if tests is not None and not fit_in_a_task(tests.record()):
            raise ValueError(f"more than {MAX_PUBLIC_BYTES} bytes of JSON, which is too much to send with each task")
        return tests

    @field_validator("prompt_template")
    @classmethod
    def _holds_the_prompt(cls, template: str) -> str:
        if template and PROMPT not in template:
            raise ValueError(f"has no {PROMPT}, so nobody would read the prompt")
        return template

    @field_validator("languages")
    @classmethod
    def _named_as_here(cls, languages: list[str]) -> list[str]:
        return list(dict.fromkeys(map(language_name, languages)))

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        languages, profile = tuple(self.languages), Profile(self.profile)
        if fault := language_fault(languages, self.tests.type, profile, text_is_code=self.text_is_code):
            raise ValueError(f"languages: {fault}")
        return self

    def record(self) -> Problem:
        """The domain record."""
        return Problem(
            **{name: getattr(self, name) for name in (*_TEXTS, "text_is_code")},
            tests=self.tests.record(),
            limits=self.limits.record(),
            comparator=self.comparator.record(),
            prelude=Prelude(self.prelude),
            profile=Profile(self.profile),
            public_tests=None if self.public_tests is None else self.public_tests.record(),
            languages=tuple(self.languages),
            libraries=tuple(self.libraries),
        )


def fit_in_a_task(tests: Tests) -> bool:
    """Whether tests are small enough to be public tests."""
    return len(canonical_json(tests)) <= MAX_PUBLIC_BYTES


def save_problems(path: Path, problems: Iterable[Problem | ReferencedProblem]) -> None:
    """Write `problems` as JSONL. The file is replaced atomically."""
    temporary = path.with_name(f".part-{path.name}")
    with whole_or_gone(temporary), naming_storage_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with created(temporary, path.name) as file:
            for item in problems:
                file.write(line_of(item))
        temporary.replace(path)


def read_bodies(path: Path, refused: list[FileFault] | None = None) -> Iterator[ProblemBody]:
    """The lines of a file, one at a time. Raises ProblemFileError for a wrong line and a file without problems.

    With `refused`, wrong lines are added to it and left out, unless the file is none of JSON lines at all.
    """
    seen: set[str] = set()
    try:
        with opened(regular(path, often=True)) as file:
            for at, line in enumerate(bounded_lines(file), 1):
                if not line.strip():
                    continue
                body = _body(line)
                if isinstance(body, ProblemBody) and body.problem_id not in seen:
                    seen.add(body.problem_id)
                    yield body
                    continue
                fault = body if isinstance(body, str) else f"problem_id {body.problem_id!r} occurs twice"
                if refused is None:
                    raise ProblemFileError(f"{path}, line {at}: {fault}{'' if seen else _hint_of(path)}")
                refused.append(FileFault(f"line {at}", fault, is_of_line=True))
    except (OSError, FileRefused) as error:
        raise ProblemFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not seen and not refused:
        raise ProblemFileError(f"{path} holds no problem")
    if not seen and refused and (hint := _hint_of(path)):
        raise ProblemFileError(f"{path}, {refused[0]}{hint}")


# Data sets in other forms, by columns that each of them has; `generic` reads the rest.
_SETS = {
    "leetcode": ("query", "entry_point", "test"),
    "humaneval": ("task_id", "prompt", "entry_point", "test"),
    "mbpp": ("task_id", "test_list"),
    "livecodebench": ("question_content", "public_test_cases"),
    "bigcodebench": ("complete_prompt", "instruct_prompt", "test"),
    "code_contests": ("description", "public_tests", "private_tests"),
    "apps": ("question", "input_output"),
    "generic": ("prompt", "reward_model"),
}


def import_hint(path: Path, columns: Sequence[str]) -> str:
    """How a file with these columns becomes a problem file, to be said after its fault."""
    found = [name for name, known in _SETS.items() if {*known} <= {*columns}]
    form = found[0] if found else "generic --column prompt=COLUMN --column tests=COLUMN"
    shown = one_line(", ".join(columns[:8]))[:300]
    command = f"nouscoder data import {form} {shlex.quote(str(path))}"
    return f"; it has the columns {shown}: make a problem file with {command}"


def _hint_of(path: Path) -> str:
    """The hint for CSV, JSON arrays and the JSON lines of another data set; empty for faulty problems."""
    with opened(path) as file:
        text = file.read(_SNIFFED_BYTES).decode("utf8", "replace").strip()
    try:
        first, end = json.JSONDecoder().raw_decode(text.lstrip("[ \r\n\t"))
    except (ValueError, RecursionError):
        columns = text.partition("\n")[0].split(",")
        return import_hint(path, columns) if len(columns) > 1 and text[0] not in "{[" else ""
    is_object, is_array, is_line = isinstance(first, dict), text[0] == "[", "\n" not in text[:end]
    if is_object and "tests" not in first and (is_array or is_line):
        return import_hint(path, list(first))
    if is_object and is_line and not is_array:
        return ""
    how = "'.[]'" if is_array else "."
    return f"; write one JSON object a line, as by: jq -c {how} {shlex.quote(str(path))}"


def _body(line: bytes) -> ProblemBody | str:
    """The problem, or what is wrong with the line."""
    try:
        json_weight(line)
        return _validated(line)
    except ValidationError as error:
        faults = [_fault(field, wrong) for field, wrong in all_faults(error)]
        more = f" (and {len(faults) - _MOST_SHOWN} more)" if len(faults) > _MOST_SHOWN else ""
        return f"{'; '.join(faults[:_MOST_SHOWN])}{more}"
    except NotTests as error:
        return f"{error.field}: {error}"
    except (RepeatedKey, TooManyValues) as error:
        return str(error)


def _validated(line: bytes) -> ProblemBody:
    """The line, which may be in the public forms that the grading API takes too. Raises as `_body` catches."""
    try:
        return ProblemBody.model_validate_json(line)
    except ValidationError:
        known = _in_our_form(line)
        if known is None:
            raise
        return ProblemBody.model_validate_json(to_json(known))


def _in_our_form(line: bytes) -> dict[str, Any] | None:
    """The record with `problem_id` for task_id and with our form of tests; None if nothing is to be rewritten."""
    try:
        record = bounded_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    values, known = ValueCount(), dict(record)
    for name in ("tests", "public_tests"):
        shaped = rewritten({"tests": record[name]}, values) if record.get(name) is not None else None
        known |= {} if shaped is None else {name: shaped["tests"]}
    task_id = known.pop("task_id", None)
    if task_id is not None:
        known.setdefault("problem_id", str(task_id))
    return None if known == record else known


def _fault(field: str, wrong: str) -> str:
    if wrong == "Field required":
        return f"{field} is missing"
    if field == "body":  # no field, but the whole line
        return wrong
    return f"{field}: {wrong}{did_you_mean(field, ProblemBody.model_fields) if wrong == 'unknown field' else ''}"


def line_of(item: Problem | ReferencedProblem) -> bytes:
    """The line of a problem file, with its newline."""
    item = item if isinstance(item, ReferencedProblem) else ReferencedProblem(item)
    problem = item.problem
    record: dict[str, Any] = {name: getattr(problem, name) for name in _ORDER}
    record["limits"] = asdict(problem.limits)
    record["comparator"] = ComparatorBody.of(problem.comparator).written()
    if problem.public_tests is not None:
        record["public_tests"] = json.loads(canonical_json(problem.public_tests))
    record |= {"references": list(map(asdict, item.references))} if item.references else {}
    record |= {"metadata": dict(item.metadata)} if item.metadata else {}
    head = json.dumps(record, ensure_ascii=False).encode()
    return head[:-1] + b', "tests": ' + canonical_json(problem.tests) + b"}\n"


@dataclass(frozen=True, slots=True)
class Reference:
    """A program that is assumed to be right."""

    code: str
    language: str = "python"

    def submission(self, problem: Problem, **others: Any) -> Submission:
        """The program with the rules of this problem, and with `others` in place of a submission's defaults."""
        return Submission(
            tests=problem.tests,
            code=self.code,
            language=self.language,
            limits=problem.limits,
            comparator=problem.comparator,
            profile=problem.profile,
            prelude=problem.prelude if self.language == "python" else Prelude.NONE,
            libraries=problem.libraries,
            **others,
        )


@dataclass(frozen=True, slots=True)
class ReferencedProblem:
    """A problem, its references and facts. `names_languages`: its data set says in which languages it is answered."""

    problem: Problem
    references: tuple[Reference, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    names_languages: bool = False


_CHECKER = """import sys

given, output, answer = (open(name).read().split() for name in sys.argv[1:4])
sys.exit(0 if sum(map(int, output)) == int(given[0]) else 1)  # testlib's exit codes: 0 right, 1 wrong
"""
_INTERACTOR = """import sys

secret = int(open(sys.argv[1]).read())  # the arguments: input, output, answer
for _ in range(20):
    guess = int(input())
    print("right" if guess == secret else "larger" if secret > guess else "smaller", flush=True)
    if guess == secret:
        sys.exit(0)
sys.exit(1)
"""
EXAMPLES: list[dict[str, Any]] = [
    {
        "problem_id": "sum",
        "prompt": "Read two integers from standard input and print their sum.",
        "tests": {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}]},
        "limits": {"wall_time_s": 5},
        "difficulty": "easy",
        "references": ["print(sum(map(int, input().split())))"],
    },
    {
        "problem_id": "two-sum",
        "prompt": "Write twoSum(nums, target) that returns the indices of the two numbers whose sum is target.",
        "tests": {
            "type": "call",
            "entry_point": "twoSum",
            "cases": [
                {"args": [[2, 7, 11], 9], "expected": [0, 1]},
                {"kwargs": {"nums": [3, 3], "target": 6}, "expected": [0, 1]},
            ],
        },
        "prelude": "lcb",
    },
    {
        "problem_id": "double",
        "prompt": "Write double(x).",
        "tests": {
            "type": "assert",
            "setup": "import math",
            "cases": ["assert double(2) == 4", "assert math.isnan(double(math.nan))"],
        },
    },
    {
        "problem_id": "split",
        "prompt": "Read n and print two integers whose sum is n.",
        "tests": {
            "type": "checker",
            "checker": {"language": "python", "code": _CHECKER},
            "cases": [{"input": "7\n"}],
        },
    },
    {
        "problem_id": "guess",
        "prompt": "Guess an integer from 1 to 1000. Print a guess; read larger, smaller or right.",
        "tests": {
            "type": "interactive",
            "interactor": {"language": "python", "code": _INTERACTOR},
            "cases": [{"input": "417\n"}],
        },
    },
    {
        "problem_id": "half",
        "prompt": "What is one half of one half? Put the answer in a box.",
        "tests": {"type": "math", "cases": [{"expected": "\\frac{1}{4}"}]},
    },
]


def problem_schema() -> dict[str, Any]:
    """The JSON Schema of one line of a problem file."""
    schema = ProblemBody.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "A problem",
        "description": "One line of a problem file (JSON lines: .jsonl, .jsonl.gz, .jsonl.zst).",
        "examples": EXAMPLES,
    }
