"""A submission: code to grade, its tests and its limits.

The `cases` of tests are a tuple, or a sequence that reads each case from a file on access
(nouscoder.store.case_files), so use only their index and length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from nouscoder.domain.languages import KNOWN

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one test's process tree. The defaults are those of NousCoder-14B: 15 s and 4 GiB."""

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
    """How an output is compared with the expected output."""

    EXACT = "exact"
    LINES = "lines"
    TOKENS = "tokens"
    UNORDERED_LINES = "unordered_lines"
    KATTIS = "kattis"  # tokens, and numbers as Kattis's default validator compares them
    LCB = "lcb"  # lines, and lines of numbers as LiveCodeBench's grader compares them
    ENTRY_POINT = "entry_point"  # a function of the operator


_MAX_NAME_CHARS = 40
LANGUAGES = frozenset(KNOWN)
_LANGUAGE_NAMES = {name: one.name for one in KNOWN.values() for name in (one.name, *one.aliases)}
_COMPILERS = "|".join(re.escape(compiler) for one in KNOWN.values() for compiler in one.compilers)
# A vendor, a name, a version, the bits, and in parentheses a compiler with its version: `GNU C++17 (64)`.
_GIVEN_NAME = re.compile(
    r"(?:gnu )?(?P<name>[a-z][a-z.]*(?:\+\+|#)?) ?-?(?P<version>[0-9][0-9.]*)?(?:-(?:32|64))?"
    rf"(?: \((?:(?P<compiler>{_COMPILERS}) ?)?"
    r"(?P<other>[0-9][0-9.]*)?(?:-(?:32|64))?\))?"
)


def language_name(given: str, *, any_standard: bool = False) -> str:
    """The name of a language here, from one of the names that data sets use: `Python3`, `GNU C++17`, `nodejs`.

    An unknown name is returned unchanged, and so is one with a version that is another language (`Python 2`), or a
    standard that is not taken here (`C++23`, `cpp98`); with `any_standard` that is the language.
    """
    lowered = given.lower()
    if lowered in _LANGUAGE_NAMES:
        return _LANGUAGE_NAMES[lowered]
    found = _GIVEN_NAME.fullmatch(lowered) if len(lowered) <= _MAX_NAME_CHARS else None
    name = "" if found is None else _LANGUAGE_NAMES.get(found["name"], "")
    if found is None or not name:
        return given
    if name == "python" and "pypy" in lowered:
        name = "pypy"
    version = found["version"] or found["other"] or ""
    standard = found["version"] or (None if found["compiler"] else found["other"])
    language = KNOWN[name]
    if standard and not any_standard and not language.takes(int(standard.partition(".")[0])):
        return given
    is_other = bool(language.versions and version) and not f"{version}.".startswith(
        tuple(f"{one}." for one in language.versions)
    )
    return given if is_other else name


class Profile(StrEnum):
    """Which grading semantics apply."""

    PROCESS = "process"  # each test is a real process, like in a shell
    LCB = "lcb"  # like LiveCodeBench's published grader, including its mistakes
    CODE_GEN = (
        "code_gen"  # like NeMo Gym's server code_gen: LCB, where the value of a call may be close or alike in JSON
    )

    @property
    def is_lcb(self) -> bool:
        """Whether the program is found and run as by LiveCodeBench's grader: all tests in one process."""
        return self is not Profile.PROCESS


class Prelude(StrEnum):
    """Code that runs in the namespace of a Python program before it."""

    NONE = "none"
    LCB = "lcb"  # LiveCodeBench's star imports and recursion limit


@dataclass(frozen=True, slots=True)
class Comparator:
    """Tolerances apply to `tokens`, `kattis` and call results, the absolute one to `lcb`. 0 is off; the widest counts.

    `float_tolerance` counts as both an absolute and a relative tolerance. `ignore_case` is about ASCII letters of text.
    `entry_point` names the function of kind ENTRY_POINT, which the service must have loaded.
    Raises ValueError for a tolerance below 0.
    """

    kind: ComparatorKind = ComparatorKind.TOKENS
    float_tolerance: float = 0.0
    absolute_tolerance: float = 0.0
    relative_tolerance: float = 0.0
    ignore_case: bool = False
    entry_point: str = ""

    def __post_init__(self) -> None:
        if self.float_tolerance >= 0 and self.absolute_tolerance >= 0 and self.relative_tolerance >= 0:
            return
        for name in ("float_tolerance", "absolute_tolerance", "relative_tolerance"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"comparator.{name} must be at least 0")

    @property
    def absolute(self) -> float:
        """The difference between two numbers that is always allowed."""
        return max(self.float_tolerance, self.absolute_tolerance)

    @property
    def relative(self) -> float:
        """The allowed difference between two numbers, relative to the larger one."""
        return max(self.float_tolerance, self.relative_tolerance)


@dataclass(frozen=True, slots=True)
class StdinCase:
    """The program gets `input` as stdin, and `args` as its arguments, and must print `output`."""

    input: str
    output: str
    args: tuple[str, ...] = ()


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
    """Tests of one function, or of a method of `class Solution` when there is one.

    `setup` is Python that runs before the program, such as the imports of a data set. `wrapped`: an expected list of
    one value is right for that list and for its value, as in the graders of APPS, TACO and PRIME.
    """

    type: ClassVar[str] = "call"
    entry_point: str
    cases: Sequence[CallCase]
    setup: str = ""
    wrapped: bool = False


TOKEN = "@NOUSCODER_TOKEN@"


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Each case is Python that runs after `setup` and the code. It passes when it ends without an error.

    In another language there is one case. Setup, code and case are one program, which passes with exit code 0, and with
    the random word that stands in place of TOKEN in the case as the last word of its output.

    The tested code can read the case; verifier/judges/asserting.py names the consequences. With a `module`, `setup` is
    a file of tests for pytest, which imports the code by this name, and a case names one of its test functions:
    `test_add`, `TestStack::test_push`.
    """

    type: ClassVar[str] = "assert"
    cases: Sequence[str]
    setup: str = ""
    module: str = ""


class JudgeProtocol(StrEnum):
    """How a judge program gets its files, and its exit codes."""

    TESTLIB = "testlib"  # arguments: input, output, answer; 0 is right
    KATTIS = "kattis"  # arguments: input, answer, feedback folder; the output is its stdin; 42 is right, 43 is wrong


@dataclass(frozen=True, slots=True)
class JudgeProgram:
    """A program that comes with the tests and judges a candidate's output by its exit code."""

    code: str
    language: str = "cpp"
    protocol: JudgeProtocol = JudgeProtocol.TESTLIB


@dataclass(frozen=True, slots=True)
class CheckerTests:
    """Tests of a whole program. `checker` judges its output from the files input, output and answer.

    `of_code`: the checker judges the program's text. The program is not run: the file `output` is its text, and the
    checker runs within the limits of the submission, because it may run the program itself. It gets no answer file; the
    answer is a right program. With a `runner` the program never meets the checker: the runner gets its text as the file
    `code`, in the candidate's sandbox, and what it leaves as the file `output` is the checker's, in another sandbox.
    """

    type: ClassVar[str] = "checker"
    cases: Sequence[StdinCase]
    checker: JudgeProgram
    of_code: bool = False
    runner: JudgeProgram | None = None


@dataclass(frozen=True, slots=True)
class InteractiveTests:
    """Tests of a whole program that converses with `interactor`, which gets the files input, output and answer.

    `unbuffered`: the program's standard library passes on each output at once, so that it need not flush. With a
    `checker`, an interactor that accepts does not decide: the checker judges the file `output` that it has written.
    """

    type: ClassVar[str] = "interactive"
    cases: Sequence[StdinCase]
    interactor: JudgeProgram
    unbuffered: bool = False
    checker: JudgeProgram | None = None


@dataclass(frozen=True, slots=True)
class MathCase:
    """The answer must be the same mathematical object as `expected` (LaTeX or a plain expression)."""

    expected: str


@dataclass(frozen=True, slots=True)
class MathTests:
    """Tests of an answer in words and formulas. No program runs; the submission's code or completion is the answer."""

    type: ClassVar[str] = "math"
    cases: Sequence[MathCase]


def method_name(entry_point: str) -> str:
    """The name in `Solution().f`, as LeetCodeDataset writes it; a plain name as it is."""
    return entry_point.removeprefix("Solution().").removeprefix("Solution.")


Case = StdinCase | CallCase | MathCase | str
Tests = StdinTests | CallTests | AssertTests | CheckerTests | InteractiveTests | MathTests
TEST_TYPES = ("stdin", "call", "assert", "checker", "interactive", "math")


def input_size(case: Case) -> int:
    """The length of a case's input, an estimate of how hard the case is when nothing better is known."""
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
    """Tests in a test store. `digest` is "sha256:" and the SHA-256 of their JSON form in hexadecimal digits."""

    __test__ = False  # not a pytest class

    digest: str


@dataclass(frozen=True, slots=True)
class Submission:
    """Code to grade: either `code`, or `completion`, a model's answer from which the code is extracted.

    `tests_digest` identifies the content of `tests` if known, so that tests can be compared without reading them. With
    a `problem_id` the service learns the best order of the problem's tests. `stderr`: each outcome has what its program
    wrote to stderr. `files`: further source files beside the program, by plain name. The program of a completion may be
    in `language`, or in one of `other_languages`. `prompt` is what the policy was asked: where it ends with the opening
    tag of reasoning, the completion begins inside it. `libraries` are the modules that a program needs beyond the
    standard library.
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
    stderr: bool = False
    files: dict[str, str] = field(default_factory=dict)
    other_languages: tuple[str, ...] = ()
    prompt: str = ""
    libraries: tuple[str, ...] = ()

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that the program may be in. The first is meant where a completion names none."""
        return (self.language, *self.other_languages)

    def in_language(self, language: str) -> Submission:
        """The same for a program that is known to be in this language. The prelude is for programs in Python."""
        if (language,) == self.languages:
            return self
        prelude = self.prelude if language == "python" else Prelude.NONE
        return replace(self, language=language, other_languages=(), prelude=prelude)

    def __post_init__(self) -> None:
        """Raises ValueError when not exactly one of `code` and `completion` is given."""
        if (self.code is None) == (self.completion is None):
            raise ValueError("give exactly one of code and completion")
