"""The REST API's records (design.md section 7): closed and strict. Only this module turns them into domain records."""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from nouscoder.domain.reward import reward_of_verdict
from nouscoder.domain.submission import Prelude, Profile, Submission, Tests, TestsReference
from nouscoder.domain.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind
from nouscoder.formats.body import Body, first_fault
from nouscoder.formats.rules import ComparatorBody, LimitsBody
from nouscoder.formats.tests import TestsBody, TestsReferenceBody, tests_from_json
from nouscoder.verifier.grading.validation import InvalidSubmission


class _Request(Body):
    """All of a request but its tests."""

    language: str = "python"
    code: str | None = Field(None, description="the program; or give `completion`")
    completion: str | None = Field(None, description="a model's answer; its last fenced block is the program")
    limits: LimitsBody = LimitsBody()
    comparator: ComparatorBody = ComparatorBody()
    profile: Literal["process", "lcb"] = Field("process", description="lcb: what LiveCodeBench's grader would say")
    prelude: Literal["none", "lcb"] = Field("none", description="lcb: LiveCodeBench's star imports, for python")
    stop_on_first_failure: bool = True
    reveal: Literal["first_failure", "none"] = "first_failure"
    problem_id: str = Field("", description="lets the service run first the tests that failed programs for it before")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.code is None) == (self.completion is None):
            raise ValueError("give exactly one of code and completion")
        return self

    def _submission(self, tests: Tests | TestsReference) -> Submission:
        return Submission(
            tests=tests,
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


class GradeRequest(_Request):
    """One submission with its tests."""

    tests: TestsBody

    def submission(self) -> Submission:
        """The domain's record."""
        return self._submission(self.tests.record())


class StoredGradeRequest(_Request):
    """One submission whose tests were stored before."""

    tests: TestsReferenceBody

    def submission(self) -> Submission:
        """The domain's record."""
        return self._submission(self.tests.record())


class StoredTestsAnswer(BaseModel):
    """What names stored tests from now on."""

    digest: str = Field(description="sha256: and 64 hex digits; give it as tests.digest")
    num_tests: int
    num_bytes: int = Field(description="size of the tests' JSON form, which counts against the client's quota")


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
        if not _names_stored_tests(error):
            raise InvalidSubmission(*first_fault(error)) from None
    try:
        return StoredGradeRequest.model_validate_json(body).submission()
    except ValidationError as error:
        raise InvalidSubmission(*first_fault(error)) from None


def _names_stored_tests(error: ValidationError) -> bool:
    """Whether `tests` has no type but a digest."""
    return any(
        fault["type"] == "union_tag_not_found" and fault["loc"] == ("tests",) and "digest" in fault["input"]
        for fault in error.errors(include_url=False, include_context=False)
    )


def parse_tests(body: bytes) -> Tests:
    """Tests alone, as PUT /v1/tests takes them. Raises InvalidSubmission naming the field at fault."""
    try:
        return tests_from_json(body)
    except ValidationError as error:
        raise InvalidSubmission(*first_fault(error, "tests")) from None


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
        "reward": None if verdict.is_ours else reward_of_verdict(verdict),
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
