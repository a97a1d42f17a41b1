"""The JSON records that the grading API, problem files and the test store share: limits, comparators and tests.

Unknown fields are refused, types are strict, and a fault is named by its field.

`canonical_parts` writes the canonical form of tests: the fields in the order of the records below, with all defaults
(except the protocol of a judge program, the arguments of a program, the module of asserts, `of_code`, and the setup and
`wrapped` of calls), without white space, in UTF-8. `cases` is last, so that a file can be read case by case. The order
of keys inside a call's values is kept, because a program can see it. NaN and infinity are written like in Python's json
module. The SHA-256 of these bytes is the digest of the tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_json

from nouscoder.domain.submission import (
    TEST_TYPES,
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    Comparator,
    ComparatorKind,
    InteractiveTests,
    JudgeProgram,
    JudgeProtocol,
    Limits,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
    Tests,
    TestsReference,
    language_name,
    method_name,
)
from nouscoder.errors import plain_fault
from nouscoder.formats.json_values import case_json

_Item = TypeVar("_Item")


class _FirstFault(FailFast):
    """Hashable, for unions."""

    __hash__ = object.__hash__


# A client may send millions of items. Only the first that is wrong is a fault.
ListOf = Annotated[list[_Item], _FirstFault()]
MOST_FAULTS = 1000  # each takes microseconds and half a kilobyte to list


class Body(BaseModel):
    """Base of every received record: unknown fields fail, "1" is not 1. Frozen, so that defaults can be shared."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


_SAID = {"model_type": "not a JSON object", "extra_forbidden": "unknown field"}


def first_fault(error: ValidationError, prefix: str = "") -> tuple[str, str]:
    """(field, message) of the first fault. `prefix` is the field that holds the whole record.

    Of a record with very many faults only their number is told.
    """
    if error.error_count() > MOST_FAULTS:
        return prefix or "body", f"has {error.error_count()} faults"
    return _fault(error.errors(include_url=False, include_context=True)[0], prefix)


def all_faults(error: ValidationError) -> list[tuple[str, str]]:
    """(field, message) of each fault."""
    return [_fault(fault, "") for fault in error.errors(include_url=False, include_context=True)]


def _fault(fault: ErrorDetails, prefix: str) -> tuple[str, str]:
    kind, context = fault["type"], fault.get("ctx", {})
    field = _field_name((prefix, *fault["loc"]) if prefix else fault["loc"])
    if kind == "union_tag_invalid":
        given = str(context.get("tag"))
        return f"{field}.type", f"{given!r:.40} is none of {', '.join(TEST_TYPES)}"
    if kind == "union_tag_not_found":
        return f"{field}.type", "is missing"
    if kind == "json_invalid":
        return "body", f"not JSON: {context.get('error', fault['msg'])}".replace(" at line 1 column ", " at column ")
    if kind == "model_type" and field == "comparator":
        kinds = ", ".join(ComparatorKind)
        return field, f'not a JSON object such as {{"type": "tokens"}}; the types are {kinds}'
    return field, _SAID.get(kind) or plain_fault(fault["msg"])


def _field_name(loc: tuple[int | str, ...]) -> str:
    """A name such as tests.cases[0].input, from pydantic's path, which also has the tag of a union."""
    parts = [part for at, part in enumerate(loc) if not (at == 1 and loc[0] == "tests" and part in TEST_TYPES)]
    parts = [part for part in parts if part not in ("str", "dict[str,any]", "list[any]")]  # of a union
    name = ""
    for part in parts:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name.lstrip(".") or "body"


_DEFAULT = Limits()


class LimitsBody(Body):
    """The limits of one test."""

    wall_time_s: float = Field(_DEFAULT.wall_time_s, gt=0, description="seconds")
    cpu_time_s: float = Field(_DEFAULT.cpu_time_s, gt=0, description="seconds, user and system")
    memory_bytes: int = Field(_DEFAULT.memory_bytes, gt=0)
    output_bytes: int = Field(_DEFAULT.output_bytes, gt=0, description="of stdout, and of stderr")
    processes: int = Field(_DEFAULT.processes, gt=0, description="processes and threads at once")

    def record(self) -> Limits:
        """The domain record."""
        return Limits(self.wall_time_s, self.cpu_time_s, self.memory_bytes, self.output_bytes, self.processes)


class ComparatorBody(Body):
    """The comparison of outputs. The result of a call is always compared as a value."""

    type: Literal["exact", "lines", "tokens", "unordered_lines", "kattis", "lcb", "entry_point"] = "tokens"
    float_tolerance: float = Field(0.0, ge=0, description="absolute or relative, whichever is wider; 0 is off")
    absolute_tolerance: float = Field(0.0, ge=0, description="of numbers; 0 is off")
    relative_tolerance: float = Field(
        0.0, ge=0, description="of numbers, relative to the larger one (kattis: to the expected one); 0 is off"
    )
    ignore_case: bool = Field(False, description="upper and lower case ASCII letters of text are equal")
    entry_point: str = Field("", description="type entry_point: a function that the service lists in its comparators")

    def record(self) -> Comparator:
        """The domain record."""
        tolerances = (self.float_tolerance, self.absolute_tolerance, self.relative_tolerance)
        return Comparator(ComparatorKind(self.type), *tolerances, self.ignore_case, self.entry_point)

    @classmethod
    def of(cls, comparator: Comparator) -> ComparatorBody:
        """The JSON form of a domain record."""
        fields = asdict(comparator)
        return cls(type=fields.pop("kind").value, **fields)

    def written(self) -> dict[str, Any]:
        """As problem files and requests have it: without an entry point where there is none."""
        return self.model_dump(exclude=None if self.entry_point else {"entry_point"})


_DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
_MAX_ARGUMENTS = 64
Argument = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class StdinCaseBody(Body):
    """One run of the whole program."""

    input: str = Field(description="the program's stdin")
    output: str = Field(description="the expected output")
    args: ListOf[Argument] = Field([], max_length=_MAX_ARGUMENTS, description="the program's arguments")

    def record(self) -> StdinCase:
        """The domain's record."""
        return StdinCase(self.input, self.output, tuple(self.args))


class StdinTestsBody(Body):
    """Tests of a whole program."""

    type: Literal["stdin"]
    cases: ListOf[StdinCaseBody] = Field(min_length=1)

    def record(self) -> StdinTests:
        """The domain's record."""
        return StdinTests(tuple(case.record() for case in self.cases))


class CallCaseBody(Body):
    """One call."""

    args: list[JsonValue] = Field([], description="positional arguments")
    kwargs: dict[str, JsonValue] = Field({}, description="keyword arguments")
    expected: JsonValue = Field(description="the expected return value")


class CallTestsBody(Body):
    """Tests of one function, or of a method of `class Solution`."""

    type: Literal["call"]
    entry_point: str = Field(description="name of the function, or of the method of `class Solution`")
    setup: str = Field("", description="Python that runs before the program, such as imports")
    wrapped: bool = Field(
        False, description="an `expected` that is a list of one value is right for that list and for its value"
    )
    cases: ListOf[CallCaseBody] = Field(min_length=1)

    def record(self) -> CallTests:
        """The domain's record."""
        cases: list[Any] = [CallCase(tuple(case.args), case.kwargs, case.expected) for case in self.cases]
        return CallTests(method_name(self.entry_point), tuple(cases), self.setup, self.wrapped)


class AssertTestsBody(Body):
    """Python statements, or test functions of pytest, that must end without an error. The code can read them."""

    type: Literal["assert"]
    setup: str = Field("", description="Python that runs before the code; with `module`, a file of tests for pytest")
    module: str = Field(
        "",
        max_length=100,
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$",
        description="the name by which the file of tests imports the code",
    )
    cases: ListOf[str] = Field(
        min_length=1, description='such as "assert f(1) == 2"; with `module`, "test_f" or "TestF::test_one"'
    )

    def record(self) -> AssertTests:
        """The domain's record."""
        return AssertTests(tuple(self.cases), self.setup, self.module)


class JudgeProgramBody(Body):
    """A checker or an interactor."""

    language: str = "cpp"
    code: str = Field(min_length=1)
    protocol: Literal["testlib", "kattis"] = Field(
        "testlib", description="arguments and exit codes: kattis is `input answer feedback_folder`, 42 right, 43 wrong"
    )

    def record(self) -> JudgeProgram:
        """The domain's record."""
        return JudgeProgram(self.code, language_name(self.language), JudgeProtocol(self.protocol))


class CheckedCaseBody(StdinCaseBody):
    """One run of the whole program."""

    output: str = Field("", description="the judge's answer file; the candidate never sees it")


class InteractiveCaseBody(Body):
    """One conversation with the interactor."""

    input: str = Field(description="the interactor's input file")
    output: str = Field("", description="the judge's answer file; the candidate never sees it")

    def record(self) -> StdinCase:
        """The domain's record."""
        return StdinCase(self.input, self.output)


class CheckerTestsBody(Body):
    """Tests of a whole program. The checker runs with three files as arguments: `input output answer`."""

    type: Literal["checker"]
    checker: JudgeProgramBody
    of_code: bool = Field(
        False,
        description="the program is not run: `output` is its text, there is no `answer`, the limits are the checker's",
    )
    runner: JudgeProgramBody | None = Field(
        None,
        description="with of_code: gets the program's text as the file `code`, not `input`, in a sandbox of its own;"
        " the file `output` that it makes is the checker's",
    )
    cases: ListOf[CheckedCaseBody] = Field(min_length=1)

    def record(self) -> CheckerTests:
        """The domain's record."""
        runner = self.runner.record() if self.runner is not None else None
        return CheckerTests(tuple(case.record() for case in self.cases), self.checker.record(), self.of_code, runner)


class InteractiveTestsBody(Body):
    """Tests of a whole program that converses with the interactor, whose arguments are `input output answer`."""

    type: Literal["interactive"]
    interactor: JudgeProgramBody
    unbuffered: bool = Field(False, description="the program need not flush its output (python, pypy, c, cpp)")
    checker: JudgeProgramBody | None = Field(
        None, description="judges the file `output` that an interactor which accepts has written (testlib's `tout`)"
    )
    cases: ListOf[InteractiveCaseBody] = Field(min_length=1)

    def record(self) -> InteractiveTests:
        """The domain's record."""
        cases = tuple(case.record() for case in self.cases)
        checker = self.checker.record() if self.checker is not None else None
        return InteractiveTests(cases, self.interactor.record(), self.unbuffered, checker)


class MathCaseBody(Body):
    """One gold answer."""

    expected: str = Field(min_length=1, max_length=4000, description="LaTeX, or a plain expression")


class MathTestsBody(Body):
    """Tests of an answer in words and formulas, with or without a box around it. No program runs."""

    type: Literal["math"]
    cases: ListOf[MathCaseBody] = Field(min_length=1)

    def record(self) -> MathTests:
        """The domain's record."""
        return MathTests(tuple(MathCase(case.expected) for case in self.cases))


class TestsReferenceBody(Body):
    """Tests that were stored before with PUT /v1/tests."""

    digest: str = Field(pattern=_DIGEST_PATTERN, description="the digest in the answer of PUT /v1/tests")

    def record(self) -> TestsReference:
        """The domain's record."""
        return TestsReference(self.digest)


TestsBody = Annotated[
    StdinTestsBody | CallTestsBody | AssertTestsBody | CheckerTestsBody | InteractiveTestsBody | MathTestsBody,
    Field(discriminator="type"),
]
_TESTS: TypeAdapter[Any] = TypeAdapter(TestsBody)


def tests_from_json(data: bytes | str) -> Tests:
    """Parse the JSON form of tests. Raises pydantic's ValidationError."""
    tests: Tests = _TESTS.validate_json(data).record()
    return tests


def tests_from_record(record: dict[str, Any]) -> Tests:
    """Like `tests_from_json`, from the values of the JSON form, whose texts are not copied. Not for call tests.

    Validating the values of call tests takes longer than validating their JSON. Raises pydantic's ValidationError.
    """
    tests: Tests = _TESTS.validate_python(record, strict=False).record()
    return tests


def head_record(tests: Tests) -> dict[str, object]:
    """The fields before `cases`."""
    match tests:
        case CallTests():
            # Fields that are not set are left out, as in the digests of earlier versions.
            others = {name: value for name in ("setup", "wrapped") if (value := getattr(tests, name))}
            return {"type": tests.type, "entry_point": tests.entry_point, **others}
        case AssertTests():
            module = {"module": tests.module} if tests.module else {}  # else as in the digests of earlier versions
            return {"type": tests.type, "setup": tests.setup, **module}
        case CheckerTests():
            of_code = {"of_code": True} if tests.of_code else {}  # else as in the digests of earlier versions
            runner = {} if tests.runner is None else {"runner": _judge_record(tests.runner)}
            return {"type": tests.type, "checker": _judge_record(tests.checker), **of_code, **runner}
        case InteractiveTests():
            head: dict[str, object] = {"type": tests.type, "interactor": _judge_record(tests.interactor)}
            if tests.unbuffered:  # else as in the digests of earlier versions
                head |= {"unbuffered": True}
            return head if tests.checker is None else head | {"checker": _judge_record(tests.checker)}
        case StdinTests() | MathTests():
            return {"type": tests.type}


def _judge_record(program: JudgeProgram) -> dict[str, str]:
    """The fields of a judge program. testlib's protocol is left out, as in the digests of earlier versions."""
    record = {"code": program.code, "language": program.language}
    return record if program.protocol is JudgeProtocol.TESTLIB else record | {"protocol": program.protocol.value}


def canonical_parts(tests: Tests) -> Iterator[bytes]:
    """The parts of the canonical form: all before the first case, each case with the comma before it, and the end.

    Raises ValueError for a text that is not Unicode, and RecursionError for values that are too deep.
    """
    yield to_json(head_record(tests))[:-1] + b',"cases":['
    for index in range(len(tests.cases)):
        yield (b"," if index else b"") + case_json(tests.cases[index])
    yield b"]}"


def canonical_json(tests: Tests) -> bytes:
    """The whole canonical form."""
    return b"".join(canonical_parts(tests))


def digest_of(tests: Tests) -> str:
    """The digest of the tests. Raises what `canonical_parts` raises."""
    digest = hashlib.sha256()
    for part in canonical_parts(tests):
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"
