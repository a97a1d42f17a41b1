"""The types of tests as the REST API takes them, one record a type, each turned into its domain record."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    InteractiveTests,
    JudgeProgram,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
)

TEST_TYPES = ("stdin", "call", "assert", "checker", "interactive", "math")


class Body(BaseModel):
    """Base of every record that comes in: unknown fields fail, "1" is not 1. Frozen, so that defaults are shared."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StdinCaseBody(Body):
    """One run of the whole program."""

    input: str = Field(description="what the program reads on stdin")
    output: str = Field(description="what it must print")

    def record(self) -> StdinCase:
        """The domain's record."""
        return StdinCase(self.input, self.output)


class StdinTestsBody(Body):
    """Tests of a whole program."""

    type: Literal["stdin"]
    cases: list[StdinCaseBody] = Field(min_length=1)

    def record(self) -> StdinTests:
        """The domain's record."""
        return StdinTests(tuple(case.record() for case in self.cases))


class CallCaseBody(Body):
    """One call."""

    args: list[JsonValue] = Field([], description="positional arguments")
    kwargs: dict[str, JsonValue] = Field({}, description="keyword arguments")
    expected: JsonValue = Field(description="what the call must return")


class CallTestsBody(Body):
    """Tests of one function, or of a method of `class Solution`."""

    type: Literal["call"]
    entry_point: str = Field(description="name of the function or method")
    cases: list[CallCaseBody] = Field(min_length=1)

    def record(self) -> CallTests:
        """The domain's record."""
        cases: list[Any] = [CallCase(tuple(case.args), case.kwargs, case.expected) for case in self.cases]
        return CallTests(self.entry_point, tuple(cases))


class AssertTestsBody(Body):
    """Python statements that must end without an error; what they state is visible to the code."""

    type: Literal["assert"]
    cases: list[str] = Field(min_length=1, description='such as "assert f(1) == 2"')
    setup: str = Field("", description="python that is executed before the code")

    def record(self) -> AssertTests:
        """The domain's record."""
        return AssertTests(tuple(self.cases), self.setup)


class JudgeProgramBody(Body):
    """A checker or an interactor; it says by testlib's exit codes what it found."""

    language: str = "cpp"
    code: str = Field(min_length=1)

    def record(self) -> JudgeProgram:
        """The domain's record."""
        return JudgeProgram(self.code, self.language)


class CheckedCaseBody(Body):
    """One run of the whole program."""

    input: str = Field(description="what the program reads (interactive: what the interactor reads)")
    output: str = Field("", description="the judge's answer file; the candidate never sees it")

    def record(self) -> StdinCase:
        """The domain's record."""
        return StdinCase(self.input, self.output)


class CheckerTestsBody(Body):
    """Tests of a whole program; the checker is run with the arguments `input output answer`, three files."""

    type: Literal["checker"]
    cases: list[CheckedCaseBody] = Field(min_length=1)
    checker: JudgeProgramBody

    def record(self) -> CheckerTests:
        """The domain's record."""
        return CheckerTests(tuple(case.record() for case in self.cases), self.checker.record())


class InteractiveTestsBody(Body):
    """Tests of a whole program that talks with the interactor, which has the arguments `input output answer`."""

    type: Literal["interactive"]
    cases: list[CheckedCaseBody] = Field(min_length=1)
    interactor: JudgeProgramBody

    def record(self) -> InteractiveTests:
        """The domain's record."""
        return InteractiveTests(tuple(case.record() for case in self.cases), self.interactor.record())


class MathCaseBody(Body):
    """One gold answer."""

    expected: str = Field(min_length=1, max_length=4000, description="LaTeX, or a plain expression")


class MathTestsBody(Body):
    """Tests of an answer in words and formulas, with or without a box around it; nothing is run."""

    type: Literal["math"]
    cases: list[MathCaseBody] = Field(min_length=1)

    def record(self) -> MathTests:
        """The domain's record."""
        return MathTests(tuple(MathCase(case.expected) for case in self.cases))


TestsBody = Annotated[
    StdinTestsBody | CallTestsBody | AssertTestsBody | CheckerTestsBody | InteractiveTestsBody | MathTestsBody,
    Field(discriminator="type"),
]
