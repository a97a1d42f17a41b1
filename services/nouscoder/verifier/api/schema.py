"""The REST API's records (docs/grading.md). Unknown fields are refused and types are strict.

Only this module turns them into domain records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import from_json, to_json

from nouscoder.domain.reward import reward_of_verdict
from nouscoder.domain.submission import Prelude, Profile, Submission, Tests, TestsReference, language_name
from nouscoder.domain.verdict import TestOutcome, Verdict, VerdictKind
from nouscoder.formats.body import (
    MOST_FAULTS,
    Body,
    ComparatorBody,
    LimitsBody,
    TestsBody,
    TestsReferenceBody,
    canonical_json,
    first_fault,
    tests_from_json,
)
from nouscoder.formats.json_values import (
    GIVEN_TWICE,
    RepeatedKey,
    TooManyValues,
    ValueCount,
    give_way,
    with_whole_characters,
)
from nouscoder.formats.public_shapes import NotTests, rewritten
from nouscoder.http_server.body import BodyParser
from nouscoder.store.case_files import packed, unpacked
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, TooLarge, validate_tests

# The tests of a body that is too large can be stored with PUT /v1/tests (tests_upload.py).
bodies = BodyParser(lambda message: TooLarge("body", message), lambda key: InvalidSubmission(key, GIVEN_TWICE))

_MOST_AS_OBJECTS = Bounds().num_tests  # weight of values, which the garbage collector looks at while they are graded


class _Request(Body):
    """The fields of a request besides its tests."""

    language: str = "python"
    other_languages: list[str] = Field(
        [], max_length=20, description="further languages that the program of a completion may be in"
    )
    code: str | None = Field(None, description="the program; or give `completion`")
    completion: str | None = Field(None, description="a model's answer; its last fenced block is the program")
    limits: LimitsBody = LimitsBody()
    comparator: ComparatorBody = ComparatorBody()
    profile: Literal["process", "lcb", "code_gen"] = Field(
        "process", description="lcb: the verdict of LiveCodeBench's grader; code_gen: of NeMo Gym's server code_gen"
    )
    prelude: Literal["none", "lcb"] = Field("none", description="lcb: LiveCodeBench's star imports, for python")
    stop_on_first_failure: bool = True
    reveal: Literal["first_failure", "none"] = "first_failure"
    stderr: bool = Field(False, description="each test of the answer has the end of its program's stderr")
    files: dict[str, str] = Field({}, description="further source files beside the program, by plain name")
    problem_id: str = Field("", description="tests that often failed programs for this problem run first")
    prompt: str = Field(
        "", description="what the policy was asked; where it ends with `<think>`, the completion begins with reasoning"
    )
    libraries: list[str] = Field([], description="modules that the program needs beyond Python's standard library")

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
            language=language_name(self.language),
            other_languages=tuple(map(language_name, self.other_languages)),
            limits=self.limits.record(),
            comparator=self.comparator.record(),
            stop_on_first_failure=self.stop_on_first_failure,
            reveal=self.reveal != "none",
            profile=Profile(self.profile),
            prelude=Prelude(self.prelude),
            problem_id=self.problem_id,
            stderr=self.stderr,
            files=self.files,
            prompt=self.prompt,
            libraries=tuple(self.libraries),
        )


class GradeRequest(_Request):
    """One submission with its tests."""

    tests: TestsBody

    def submission(self) -> Submission:
        """The domain record."""
        return self._submission(self.tests.record())


class StoredGradeRequest(_Request):
    """One submission whose tests were stored before."""

    tests: TestsReferenceBody

    def submission(self) -> Submission:
        """The domain record."""
        return self._submission(self.tests.record())


class StoredTestsAnswer(BaseModel):
    """The digest of stored tests, and their size."""

    digest: str = Field(description="sha256: and 64 hex digits; give it as tests.digest")
    num_tests: int
    num_bytes: int = Field(description="size of the tests' JSON form, which counts against the client's quota")


class TestBody(BaseModel):
    """The outcome of one test."""

    __test__ = False  # not a pytest class

    index: int
    outcome: VerdictKind
    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int
    score: float = Field(description="1 when accepted, the points of a checker when partly right, else 0")
    stderr: str | None = Field(None, description="absent unless the request asks for it")


class FirstFailureBody(BaseModel):
    """The failing test with the lowest index among those run; texts are clipped."""

    index: int
    outcome: VerdictKind
    input: str
    expected: str
    output: str
    stderr: str


class GradeAnswer(BaseModel):
    """A verdict. `reward` is null for an internal_error, because the candidate was not judged."""

    verdict: VerdictKind
    passed: int
    total: int
    reward: float | None
    score: float = Field(description="the mean score of all tests, from 0 to 1; a test that did not run has 0")
    first_failure: FirstFailureBody | None
    tests: list[TestBody]
    graded: int
    duration_s: float
    backend: str
    cached: bool
    detail: str


class Fault(BaseModel):
    """Why a request was refused. `field` names the invalid part, if there is one."""

    detail: str
    field: str | None = None


Sent = TypeVar("Sent", bound=BaseModel)


def body_of(schema: dict[str, Any] | str) -> dict[str, Any]:
    """What the OpenAPI document says of a call whose body is JSON of this schema, or of the record of this name."""
    whole = {"$ref": f"#/components/schemas/{schema}"} if isinstance(schema, str) else schema
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def parsed_as(kind: type[Sent], body: bytes) -> Sent:
    """Parse a request's JSON. Raises InvalidSubmission naming the invalid field."""
    with _naming_fields():
        return kind.model_validate_json(with_whole_characters(body))


@contextmanager
def _naming_fields(whole: str = "") -> Iterator[None]:
    """Turns faults of a body into InvalidSubmission. `whole` is the field that the body is."""
    try:
        yield
    except ValidationError as error:
        raise InvalidSubmission(*first_fault(error, whole)) from None
    except NotTests as error:
        raise InvalidSubmission(error.field, str(error)) from None
    except TooManyValues as error:
        raise TooLarge("tests", str(error)) from None
    except RepeatedKey as error:
        raise InvalidSubmission(error.key, GIVEN_TWICE) from None


def parse_submission(body: bytes | str, values: ValueCount | None = None) -> Submission:
    """Parse a request's JSON, of this project or in a public shape. Raises InvalidSubmission naming the field.

    Half of a surrogate pair becomes U+FFFD.

    `values` has the weight of the body, and gets that of texts inside it that are decoded too. Without it the text is
    of this machine's own user, and may hold any number. Tests with many values are then in memory as a compressed file.
    """
    values = values or ValueCount.unbounded()
    if isinstance(body, str):
        body = body.encode("utf8", "replace")
    with _naming_fields():
        submission = _submission_from(with_whole_characters(body), values)
    give_way(len(body))
    return compact(submission, values)


def compact(submission: Submission, values: ValueCount) -> Submission:
    """The submission; tests with many values as the bytes of a compressed file, whose cases are decoded when used.

    Raises InvalidSubmission for more tests than may be graded.
    """
    if values.weight <= _MOST_AS_OBJECTS or isinstance(submission.tests, TestsReference):
        return submission
    _check_number(submission.tests.cases)
    data, digest = packed(submission.tests)
    return replace(submission, tests=unpacked(data), tests_digest=digest)


def _submission_from(body: bytes, values: ValueCount) -> Submission:
    """Raises ValidationError, TooManyValues and InvalidSubmission."""
    try:
        return GradeRequest.model_validate_json(body).submission()
    except ValidationError as error:
        if _names_stored_tests(error):
            return StoredGradeRequest.model_validate_json(body).submission()
        known = _in_our_form(_decoded(body), values)
        if known is None:
            raise
        if isinstance(known.get("tests"), dict) and known["tests"].keys() == {"digest"}:
            return StoredGradeRequest.model_validate(known).submission()
        return GradeRequest.model_validate(known).submission()


def _in_our_form(record: Any, values: ValueCount) -> dict[str, Any] | None:
    """Raises TooManyValues and InvalidSubmission."""
    known = rewritten(record, values)
    tests = None if known is None else known.get("tests")
    if isinstance(tests, dict) and isinstance(tests.get("cases"), list):
        _check_number(tests["cases"])  # before each case costs microseconds
    return known


def _check_number(cases: Sequence[object]) -> None:
    if len(cases) > Bounds().num_tests:
        raise InvalidSubmission("tests.cases", f"may hold at most {Bounds().num_tests} tests")


def _decoded(body: bytes) -> Any:
    """The value of a JSON text; None for a text that is no JSON."""
    try:
        return from_json(body)
    except ValueError:
        return None


def request_of(submission: Submission) -> dict[str, Any]:
    """The request that `parse_submission` turns into this submission (without its `tests_digest`)."""
    tests = submission.tests
    return {
        "tests": {"digest": tests.digest} if isinstance(tests, TestsReference) else from_json(canonical_json(tests)),
        "code": submission.code,
        "completion": submission.completion,
        "language": submission.language,
        **({"other_languages": list(submission.other_languages)} if submission.other_languages else {}),
        "limits": asdict(submission.limits),
        "comparator": ComparatorBody.of(submission.comparator).written(),
        "stop_on_first_failure": submission.stop_on_first_failure,
        "reveal": "first_failure" if submission.reveal else "none",
        "profile": submission.profile.value,
        "prelude": submission.prelude.value,
        "problem_id": submission.problem_id,
        "stderr": submission.stderr,
        "files": submission.files,
        # Left out when empty, so that older services take the request.
        **({"prompt": submission.prompt} if submission.prompt else {}),
        **({"libraries": list(submission.libraries)} if submission.libraries else {}),
    }


def _names_stored_tests(error: ValidationError) -> bool:
    """Whether `tests` has a digest and no type."""
    return error.error_count() <= MOST_FAULTS and any(
        fault["type"] == "union_tag_not_found" and fault["loc"] == ("tests",) and "digest" in fault["input"]
        for fault in error.errors(include_url=False, include_context=False)
    )


def parse_tests(body: bytes, values: ValueCount | None = None) -> Tests:
    """Parse the body of PUT /v1/tests. Raises InvalidSubmission naming the invalid field. See `parse_submission`."""
    values = values or ValueCount.unbounded()
    with _naming_fields("tests"):
        tests = _tests_from(with_whole_characters(body), values)
    validate_tests(tests, Bounds())
    return tests


def _tests_from(body: bytes, values: ValueCount) -> Tests:
    """Raises ValidationError, TooManyValues and InvalidSubmission."""
    try:
        return tests_from_json(body)
    except ValidationError:
        known = _in_our_form({"tests": _decoded(body)}, values)
        if known is None or known.get("tests") is None:
            raise
        return tests_from_json(to_json(known["tests"]))


def outcome_record(outcome: TestOutcome) -> dict[str, Any]:
    """The outcome of a test with the fields of TestBody."""
    record = {
        "index": outcome.index,
        "outcome": outcome.outcome.value,
        "wall_time_s": round(outcome.wall_time_s, 6),
        "cpu_time_s": round(outcome.cpu_time_s, 6),
        "memory_bytes": outcome.memory_bytes,
        "score": outcome.score,
    }
    return record if outcome.stderr is None else {**record, "stderr": outcome.stderr}


def answer_record(verdict: Verdict) -> dict[str, Any]:
    """A verdict with the fields of GradeAnswer."""
    return {
        "verdict": verdict.kind.value,
        "passed": verdict.passed,
        "total": verdict.total,
        "reward": None if verdict.is_ours else reward_of_verdict(verdict),
        "score": verdict.score,
        "first_failure": None if verdict.first_failure is None else asdict(verdict.first_failure),
        "tests": [outcome_record(outcome) for outcome in verdict.tests],
        "graded": verdict.graded,
        "duration_s": round(verdict.duration_s, 6),
        "backend": verdict.backend,
        "cached": verdict.cached,
        "detail": verdict.detail,
    }


def answer_json(verdict: Verdict) -> bytes:
    """A verdict as the JSON of an answer."""
    return json.dumps(answer_record(verdict)).encode()
