"""The REST API's records (design.md section 7): closed, strict, and turned into domain records and back here only."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from nouscoder.domain.reward import reward_of
from nouscoder.domain.submission import Comparator, ComparatorKind, Limits, Prelude, Profile, Submission
from nouscoder.domain.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind
from nouscoder.verifier.api.schema_tests import TEST_TYPES, Body, TestsBody
from nouscoder.verifier.grading.validation import InvalidSubmission

_DEFAULT = Limits()


class LimitsBody(Body):
    """Bounds on one test."""

    wall_time_s: float = Field(_DEFAULT.wall_time_s, gt=0, description="seconds")
    cpu_time_s: float = Field(_DEFAULT.cpu_time_s, gt=0, description="seconds, user and system")
    memory_bytes: int = Field(_DEFAULT.memory_bytes, gt=0)
    output_bytes: int = Field(_DEFAULT.output_bytes, gt=0, description="of stdout, and of stderr")
    processes: int = Field(_DEFAULT.processes, gt=0, description="processes and threads alive at once")

    def record(self) -> Limits:
        """The domain's record."""
        return Limits(self.wall_time_s, self.cpu_time_s, self.memory_bytes, self.output_bytes, self.processes)


class ComparatorBody(Body):
    """How outputs are compared; a call's result is always compared as a value."""

    type: Literal["exact", "lines", "tokens", "unordered_lines"] = "tokens"
    float_tolerance: float = Field(0.0, ge=0, description="absolute or relative, the wider; 0 is off")
    absolute_tolerance: float = Field(0.0, ge=0, description="of numbers; 0 is off")
    relative_tolerance: float = Field(0.0, ge=0, description="of numbers, in parts of the larger one; 0 is off")

    def record(self) -> Comparator:
        """The domain's record."""
        return Comparator(
            ComparatorKind(self.type), self.float_tolerance, self.absolute_tolerance, self.relative_tolerance
        )


class GradeRequest(Body):
    """One submission."""

    language: str = "python"
    code: str | None = Field(None, description="the program; or give `completion`")
    completion: str | None = Field(None, description="a model's answer; its last fenced block is the program")
    tests: TestsBody
    limits: LimitsBody = LimitsBody()
    comparator: ComparatorBody = ComparatorBody()
    profile: Literal["process", "lcb"] = Field("process", description="lcb: what LiveCodeBench's grader would say")
    prelude: Literal["none", "lcb"] = Field("none", description="lcb: LiveCodeBench's star imports, for python")
    stop_on_first_failure: bool = True
    reveal: Literal["first_failure", "none"] = "first_failure"
    problem_id: str = Field("", description="lets the service run first the tests that failed programs for it before")

    @model_validator(mode="after")
    def _one_source(self) -> GradeRequest:
        if (self.code is None) == (self.completion is None):
            raise ValueError("give exactly one of code and completion")
        return self

    def submission(self) -> Submission:
        """The domain's record."""
        return Submission(
            tests=self.tests.record(),
            code=self.code,
            completion=self.completion,
            language=self.language,
            limits=self.limits.record(),
            comparator=self.comparator.record(),
            stop_on_first_failure=self.stop_on_first_failure,
            reveal=self.reveal != "none",
            profile=Profile(self.profile),
            prelude=Prelude(self.prelude),
            problem_id=self.problem_id,
        )


class TestBody(BaseModel):
    """What one test got."""

    __test__ = False  # not a pytest class

    index: int
    outcome: VerdictKind
    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int


class FirstFailureBody(BaseModel):
    """The failing test with the lowest index among those run; texts are clipped."""

    index: int
    outcome: VerdictKind
    input: str
    expected: str
    output: str
    stderr: str


class GradeAnswer(BaseModel):
    """A verdict. `reward` is null for an internal_error, which says nothing of the candidate."""

    verdict: VerdictKind
    passed: int
    total: int
    reward: float | None
    first_failure: FirstFailureBody | None
    tests: list[TestBody]
    graded: int
    duration_s: float
    backend: str
    cached: bool
    detail: str


class Fault(BaseModel):
    """Why a request was not taken. `field` names the part at fault, where there is one."""

    detail: str
    field: str | None = None


def parse_submission(body: bytes | str) -> Submission:
    """A request's JSON as a submission. Raises InvalidSubmission naming the field at fault."""
    try:
        return GradeRequest.model_validate_json(body).submission()
    except ValidationError as error:
        raise _fault_of(error) from None


def outcome_record(outcome: TestOutcome) -> dict[str, Any]:
    """A test's outcome in the shape of TestBody."""
    return {
        "index": outcome.index,
        "outcome": outcome.outcome.value,
        "wall_time_s": round(outcome.wall_time_s, 6),
        "cpu_time_s": round(outcome.cpu_time_s, 6),
        "memory_bytes": outcome.memory_bytes,
    }


def answer_record(verdict: Verdict) -> dict[str, Any]:
    """A verdict in the shape of GradeAnswer."""
    return {
        "verdict": verdict.kind.value,
        "passed": verdict.passed,
        "total": verdict.total,
        "reward": None if verdict.is_ours else reward_of(verdict),
        "first_failure": _failure_record(verdict.first_failure),
        "tests": [outcome_record(outcome) for outcome in verdict.tests],
        "graded": verdict.graded,
        "duration_s": round(verdict.duration_s, 6),
        "backend": verdict.backend,
        "cached": verdict.cached,
        "detail": verdict.detail,
    }


def answer_json(verdict: Verdict) -> bytes:
    """A verdict as the API answers it."""
    return json.dumps(answer_record(verdict)).encode()


def _failure_record(failure: FirstFailure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    texts = {name: getattr(failure, name) for name in ("input", "expected", "output", "stderr")}
    return {"index": failure.index, "outcome": failure.outcome.value, **texts}


def _fault_of(error: ValidationError) -> InvalidSubmission:
    fault = error.errors(include_url=False, include_context=True)[0]
    kind, context = fault["type"], fault.get("ctx", {})
    field = _field_name(fault["loc"])
    if kind == "union_tag_invalid":
        given = str(context.get("tag"))
        return InvalidSubmission("tests.type", f"{given!r:.40} is none of {', '.join(TEST_TYPES)}")
    if kind == "union_tag_not_found":
        return InvalidSubmission("tests.type", "is missing")
    if kind == "json_invalid":
        return InvalidSubmission("body", f"not JSON: {context.get('error', fault['msg'])}")
    if kind == "extra_forbidden":
        return InvalidSubmission(field, "unknown field")
    return InvalidSubmission(field, fault["msg"].removeprefix("Value error, "))


def _field_name(loc: tuple[int | str, ...]) -> str:
    """tests.cases[0].input from pydantic's path, which also holds the tag of a union."""
    parts = [part for at, part in enumerate(loc) if not (at == 1 and loc[0] == "tests" and part in TEST_TYPES)]
    name = ""
    for part in parts:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name.lstrip(".") or "body"
