"""A submission: code sent for grading, the tests it must pass and the limits it runs under.

The `cases` of tests are a tuple, or a sequence that reads each case from a file when it is asked for
(nouscoder.store.case_files): use them by index and by length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one test's process tree. Defaults are NousCoder-14B's: 15 s and 4 GiB."""

    wall_time_s: float = 15.0
    cpu_time_s: float = 15.0
    memory_bytes: int = 4 * 1024**3
    output_bytes: int = 64 * 1024**2
    processes: int = 64

    def __post_init__(self) -> None:
        """Raises ValueError naming the first limit that is not positive."""
        for name in ("wall_time_s", "cpu_time_s", "memory_bytes", "output_bytes", "processes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"limits.{name} must be positive, not {getattr(self, name)!r}")


class ComparatorKind(StrEnum):
    """How an output is compared with what was expected."""

    EXACT = "exact"
    LINES = "lines"
    TOKENS = "tokens"
    UNORDERED_LINES = "unordered_lines"


class Profile(StrEnum):
    """Whose truth counts."""

    PROCESS = "process"  # each test is a real process, as a person would run it
    LCB = "lcb"  # what LiveCodeBench's published grader says, its mistakes included


class Prelude(StrEnum):
    """What is executed in a python program's namespace before it."""

    NONE = "none"
    LCB = "lcb"  # LiveCodeBench's star imports and recursion limit


@dataclass(frozen=True, slots=True)
class Comparator:
    """Tolerances apply to `tokens` and to call results; 0 is off, and the widest of those given counts.

    `absolute_tolerance` and `relative_tolerance` are one each; `float_tolerance` is both at once.
    """

    kind: ComparatorKind = ComparatorKind.TOKENS
    float_tolerance: float = 0.0
    absolute_tolerance: float = 0.0
    relative_tolerance: float = 0.0

    @property
    def absolute(self) -> float:
        """The difference that two numbers may always have."""
        return max(self.float_tolerance, self.absolute_tolerance)

    @property
    def relative(self) -> float:
        """The difference that two numbers may have, in parts of the larger one."""
        return max(self.float_tolerance, self.relative_tolerance)


@dataclass(frozen=True, slots=True)
class StdinCase:
    """The program reads `input` on stdin and must print `output`."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """`entry_point(*args, **kwargs)` must return `expected`; all are JSON values."""

    args: tuple[JsonValue, ...] = ()
    kwargs: dict[str, JsonValue] = field(default_factory=dict)
    expected: JsonValue = None


@dataclass(frozen=True, slots=True)
class StdinTests:
    """Tests of a whole program."""

    type: ClassVar[str] = "stdin"
    cases: Sequence[StdinCase]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Tests of one function, or of a method of `class Solution` when there is one."""

    type: ClassVar[str] = "call"
    entry_point: str
    cases: Sequence[CallCase]


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Each case is a few lines of python that follow `setup` and the code; it passes when they end without an error.

    The code that is tested can see what a case states: verifier/judges/asserting.py says what follows from that.
    """

    type: ClassVar[str] = "assert"
    cases: Sequence[str]
    setup: str = ""


@dataclass(frozen=True, slots=True)
class JudgeProgram:
    """A program of whoever sends the tests, which says whether a candidate's output is right (testlib exit codes)."""

    code: str
    language: str = "cpp"


@dataclass(frozen=True, slots=True)
class CheckerTests:
    """Tests of a whole program whose output `checker` judges, given the files input, output and answer."""

    type: ClassVar[str] = "checker"
    cases: Sequence[StdinCase]
    checker: JudgeProgram


@dataclass(frozen=True, slots=True)
class InteractiveTests:
    """Tests of a whole program that talks with `interactor`, which is given the files input, output and answer."""

    type: ClassVar[str] = "interactive"
    cases: Sequence[StdinCase]
    interactor: JudgeProgram


@dataclass(frozen=True, slots=True)
class MathCase:
    """The answer must be the same mathematical object as `expected` (LaTeX or a plain expression)."""

    expected: str


@dataclass(frozen=True, slots=True)
class MathTests:
    """Tests of an answer in words and formulas; nothing is run. The submission's code or completion is the answer."""

    type: ClassVar[str] = "math"
    cases: Sequence[MathCase]


Case = StdinCase | CallCase | MathCase | str
Tests = StdinTests | CallTests | AssertTests | CheckerTests | InteractiveTests | MathTests
TEST_TYPES = ("stdin", "call", "assert", "checker", "interactive", "math")


def input_size(case: Case) -> int:
    """How long a case's input is: the guess of how hard it is, where nothing better is known."""
    match case:
        case StdinCase():
            return len(case.input)
        case CallCase():
            return len(json.dumps({"args": case.args, "kwargs": case.kwargs}))
        case MathCase():
            return 0
        case _:
            return len(case)


@dataclass(frozen=True, slots=True)
class TestsReference:
    """Tests that are kept in a test store. `digest` is "sha256:" and the SHA-256 of their JSON form, in hex."""

    __test__ = False  # not a pytest class

    digest: str


@dataclass(frozen=True, slots=True)
class Submission:
    """Code to grade. Give `code`, or `completion` to have the code extracted from a model's answer.

    `tests_digest` names the content of `tests` where it is known, so that nobody has to read all of them to compare.
    `problem_id`, where there is one, lets the service learn in which order the problem's tests are best run.
    """

    tests: Tests | TestsReference
    code: str | None = None
    completion: str | None = None
    language: str = "python"
    limits: Limits = Limits()
    comparator: Comparator = Comparator()
    stop_on_first_failure: bool = True
    reveal: bool = True
    profile: Profile = Profile.PROCESS
    prelude: Prelude = Prelude.NONE
    problem_id: str = ""
    tests_digest: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError when not exactly one of `code` and `completion` is given."""
        if (self.code is None) == (self.completion is None):
            raise ValueError("give exactly one of code and completion")
