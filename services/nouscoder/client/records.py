"""The records of the grading API as types: docs/grading.md and /openapi.json describe each field.

They are dicts at run time, so an answer can be stored as JSON as it is, and a new field of a newer service breaks
nothing. A type checker finds misspelt fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, Required, TypedDict, final

VerdictName = Literal[
    "accepted",
    "wrong_answer",
    "time_limit_exceeded",
    "memory_limit_exceeded",
    "output_limit_exceeded",
    "runtime_error",
    "compile_error",
    "no_code",
    "internal_error",
]


class Limits(TypedDict, total=False):
    """Limits of one test."""

    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int
    output_bytes: int
    processes: int


class Comparator(TypedDict, total=False):
    """How an output is compared (docs/verdicts.md)."""

    type: Literal["tokens", "kattis", "lines", "unordered_lines", "exact", "lcb", "entry_point"]
    float_tolerance: float
    absolute_tolerance: float
    relative_tolerance: float
    ignore_case: bool
    entry_point: str


class Rules(TypedDict, total=False):
    """The fields of a request besides the program and its tests."""

    language: str
    other_languages: Sequence[str]
    limits: Limits
    comparator: Comparator
    profile: Literal["process", "lcb", "code_gen"]
    prelude: Literal["none", "lcb"]
    stop_on_first_failure: bool
    reveal: Literal["first_failure", "none"]
    problem_id: str
    stderr: bool
    files: Mapping[str, str]
    prompt: str
    libraries: Sequence[str]


class GradeRequest(Rules, total=False):
    """One submission. Give exactly one of `code` (a program) and `completion` (a model's answer)."""

    code: str
    completion: str
    tests: Required[Mapping[str, Any] | str]


@final
class OutcomeAnswer(TypedDict):
    """The outcome of one test. `stderr` is there if the request asks for it."""

    index: int
    outcome: VerdictName
    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int
    score: float
    stderr: NotRequired[str]


class FirstFailure(TypedDict):
    """The failing test with the lowest index among those run; texts are clipped."""

    index: int
    outcome: VerdictName
    input: str
    expected: str
    output: str
    stderr: str


@final
class GradeAnswer(TypedDict):
    """A verdict. `reward` is None for internal_error: the service failed, and the program was not judged."""

    verdict: VerdictName
    passed: int
    total: int
    reward: float | None
    score: float
    first_failure: FirstFailure | None
    tests: list[OutcomeAnswer]
    graded: int
    duration_s: float
    backend: str
    cached: bool
    detail: str


class JobAnswer(TypedDict):
    """The state of a job. `results_bytes` is the size of its results so far; times are seconds since 1970."""

    id: str
    state: Literal["waiting", "running", "finished", "expired", "failed"]
    total: int
    done: int
    verdicts: dict[str, int]
    errors: int
    results_bytes: int
    priority: int
    webhook: Literal["waiting", "delivered", "failed"] | None
    created_s: float
    ended_s: float | None
    removed_s: float | None
    detail: str


class JobResult(TypedDict, total=False):
    """The result of one submission of a job: a verdict, or `error` when there is none.

    `key` is the number of its line, from "0"; `id` is its own id, else that number. The other fields are those of
    GradeAnswer, with `tests` only if the job asked for them.
    """

    key: Required[str]
    id: Required[str | int | float]
    error: str
    field: str | None
    verdict: VerdictName
    passed: int
    total: int
    reward: float | None
    score: float
    first_failure: FirstFailure | None
    tests: list[OutcomeAnswer]
    graded: int
    duration_s: float
    backend: str
    cached: bool
    detail: str


class CommandResult(TypedDict):
    """The result of one command of `run_code`: the compiler or the program."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None
    return_code: int | None
    stdout: str | None
    stderr: str | None


class RunAnswer(TypedDict):
    """The answer of `run_code`, as SandboxFusion writes it."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str
    compile_result: CommandResult | None
    run_result: CommandResult | None
    executor_pod_name: str | None
    files: dict[str, str]
