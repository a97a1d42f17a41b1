"""Validation of submissions. Pure. The same rules apply to REST, gRPC, files and the broker."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from keyword import iskeyword

from nouscoder.domain.submission import (
    LANGUAGES,
    AssertTests,
    CallTests,
    CheckerTests,
    ComparatorKind,
    InteractiveTests,
    JudgeProtocol,
    Limits,
    MathTests,
    Prelude,
    Profile,
    StdinTests,
    Submission,
    Tests,
    TestsReference,
)
from nouscoder.installation import how_to_install
from nouscoder.verifier.judges import mathematics
from nouscoder.verifier.judges.users_comparators import loaded_comparators
from nouscoder.verifier.toolchains.languages import installed

_FIELD_CHARS = 100
_TEST_NAME = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*::)*[A-Za-z_][A-Za-z0-9_]*")
_MOST_LIBRARIES = 100
_OF_PYTEST = {"pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
# Problem files hold the programs of their Harbor folders (data/harbor/in_sandbox.py). Answers could cheat earlier ones.
_OLD_HARBOR = re.compile(r'"""[\w ]* of an imported Harbor folder(?! \(form 2\))')


STORE_TESTS = "send large tests with PUT /v1/tests and name their digest"


class InvalidSubmission(ValueError):
    """The submission cannot be graded because of a fault in the request, not in the candidate. Names the field."""

    def __init__(self, field: str, message: str) -> None:
        # It can be text of the client: an unknown field, a key, a file name.
        begin = field[:_FIELD_CHARS]
        shown = begin if begin.isprintable() else ascii(begin)[1:-1]
        self.field = (
            shown if len(field) <= _FIELD_CHARS and len(shown) <= _FIELD_CHARS else shown[:_FIELD_CHARS] + "..."
        )
        super().__init__(f"{self.field}: {message}")


class NotInstalled(InvalidSubmission):
    """The submission needs what is not installed here. Another machine may be able to grade it."""


class TooLarge(InvalidSubmission):
    """The request holds more than one may hold. Its tests can be stored first."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, f"{message}; {STORE_TESTS}")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest limits that a submission may request. They bound the time and memory that a candidate can hold."""

    limits: Limits = Limits(
        wall_time_s=300.0, cpu_time_s=300.0, memory_bytes=64 * 1024**3, output_bytes=256 * 1024**2, processes=4096
    )
    num_tests: int = 10_000
    problem_id_chars: int = 1000  # kept in memory after the answer
    num_files: int = 64
    num_file_chars: int = 4_000_000
    num_assert_chars: int = 200_000  # see judges/asserting.py


def validate(submission: Submission, bounds: Bounds) -> None:
    """Raises InvalidSubmission that names the first invalid field."""
    for fault in faults(submission, bounds):
        raise fault


def _ignores(submission: Submission, name: str) -> bool:
    """Whether this tolerance plays no part when the output of programs is compared."""
    kinds = (ComparatorKind.EXACT, ComparatorKind.LINES, ComparatorKind.UNORDERED_LINES)
    kind, is_relative = submission.comparator.kind, name == "relative_tolerance"
    ignored = kind in kinds or (kind is ComparatorKind.LCB and is_relative)
    return isinstance(submission.tests, StdinTests) and ignored


def faults(submission: Submission, bounds: Bounds) -> Iterator[InvalidSubmission]:
    """All faults of a submission that are seen without running anything."""
    for check in (_validate_languages, _validate_tests, _validate_files, _validate_profile):
        try:
            check(submission, bounds)
        except InvalidSubmission as fault:
            yield fault
    if len(submission.problem_id) > bounds.problem_id_chars:
        yield InvalidSubmission("problem_id", f"may have at most {bounds.problem_id_chars} characters")
    if (submission.comparator.kind is ComparatorKind.ENTRY_POINT) is not bool(submission.comparator.entry_point):
        yield InvalidSubmission("comparator.entry_point", "is for the type entry_point, which needs one")
    elif (name := submission.comparator.entry_point) and name not in loaded_comparators():
        known = ", ".join(loaded_comparators()) or "none"
        yield NotInstalled("comparator.entry_point", f"{name!r:.100} is not in verifier.comparators: {known}")
    for name in ("float_tolerance", "absolute_tolerance", "relative_tolerance"):
        if not 0 <= getattr(submission.comparator, name) < math.inf:
            yield InvalidSubmission(f"comparator.{name}", "must be a number of at least 0")
        elif getattr(submission.comparator, name) and _ignores(submission, name):
            yield InvalidSubmission(f"comparator.{name}", f"{submission.comparator.kind} does not use it: take tokens")
    for item in fields(Limits):
        requested, maximum = getattr(submission.limits, item.name), getattr(bounds.limits, item.name)
        if not requested <= maximum:
            yield InvalidSubmission(f"limits.{item.name}", f"must be at most {maximum}")


def _validate_languages(submission: Submission, bounds: Bounds) -> None:
    _require_language(submission.language, "language")
    for language in submission.other_languages:
        _require_language(language, "other_languages")
    if submission.other_languages and submission.completion is None:
        raise InvalidSubmission("other_languages", "needs a completion: the language of code is language")
    tests = submission.tests
    if isinstance(tests, CallTests) and set(submission.languages) != {"python"}:
        raise InvalidSubmission("language", "call tests need python")
    if isinstance(tests, AssertTests) and set(submission.languages) != {"python"}:
        if submission.other_languages:
            raise InvalidSubmission("other_languages", "assert tests are in one language")
        if len(tests.cases) != 1 or tests.module:
            raise InvalidSubmission("tests.cases", f"in {submission.language} assert tests have one case and no module")


def _validate_tests(submission: Submission, bounds: Bounds) -> None:
    if isinstance(submission.tests, TestsReference):
        raise InvalidSubmission(
            "tests.digest", "names stored tests, and this grader has no test store: send the tests themselves"
        )
    validate_tests(submission.tests, bounds)


def _validate_files(submission: Submission, bounds: Bounds) -> None:
    if not submission.files:
        return
    if len(submission.files) > bounds.num_files or sum(map(len, submission.files.values())) > bounds.num_file_chars:
        raise InvalidSubmission(
            "files", f"may be at most {bounds.num_files}, with {bounds.num_file_chars} characters in total"
        )
    if isinstance(submission.tests, CheckerTests) and submission.tests.of_code:
        raise InvalidSubmission("files", "cannot be given to a checker of code")
    taken = [installed()[language].source_name for language in submission.languages]
    for name in submission.files:
        if not _FILE_NAME.fullmatch(name) or name in taken:
            raise InvalidSubmission(
                f"files.{name}", f"must be a plain name of at most 100 characters, not {' or '.join(taken)}"
            )


def _require_language(language: str, field: str) -> None:
    if language not in installed():
        fault = NotInstalled if language in LANGUAGES else InvalidSubmission
        raise fault(field, f"{language!r:.40} is not installed; these are: {', '.join(installed())}")


def validate_tests(tests: Tests, bounds: Bounds) -> None:
    """Raises InvalidSubmission for tests that no submission can be graded with here."""
    if not tests.cases:
        raise InvalidSubmission("tests.cases", "must hold at least one test")
    if len(tests.cases) > bounds.num_tests:
        raise InvalidSubmission("tests.cases", f"may hold at most {bounds.num_tests} tests")
    match tests:
        case CallTests() if not tests.entry_point.isidentifier() or iskeyword(tests.entry_point):
            raise InvalidSubmission("tests.entry_point", "must be the name of a function or method")
        case CallTests() if len(tests.setup) > bounds.num_assert_chars:
            raise InvalidSubmission("tests.setup", f"may have at most {bounds.num_assert_chars} characters")
        case AssertTests() if sum(map(len, tests.cases), len(tests.setup)) > bounds.num_assert_chars:
            raise InvalidSubmission("tests", f"cases and setup may total at most {bounds.num_assert_chars} characters")
        case AssertTests() if tests.module:
            if tests.module in sys.stdlib_module_names | _OF_PYTEST:
                raise InvalidSubmission("tests.module", f"{tests.module} is the name of a module that pytest needs")
            if not tests.setup:
                raise InvalidSubmission("tests.setup", "must be the file of tests")
            for index in range(len(tests.cases)):
                if not _TEST_NAME.fullmatch(tests.cases[index]):
                    raise InvalidSubmission(
                        f"tests.cases[{index}]", "must be the name of a test: test_f or TestF::test_one"
                    )
        case CheckerTests():
            _require_language(tests.checker.language, "tests.checker.language")
            if tests.of_code and _OLD_HARBOR.match(tests.checker.code):
                message = "is that of a Harbor folder that an earlier version imported: import it again (data import)"
                raise InvalidSubmission("tests.checker", message)
            if tests.of_code and tests.checker.protocol is not JudgeProtocol.TESTLIB:
                raise InvalidSubmission("tests.checker.protocol", "must be testlib with of_code")
            if tests.runner is not None:
                if not tests.of_code:
                    raise InvalidSubmission("tests.runner", "needs of_code: without it the program itself is run")
                _require_language(tests.runner.language, "tests.runner.language")
        case InteractiveTests():
            _require_language(tests.interactor.language, "tests.interactor.language")
            if tests.checker is not None:
                _require_language(tests.checker.language, "tests.checker.language")
        case MathTests() if not mathematics.is_installed():
            raise NotInstalled("tests.type", f"math needs the library math-verify: {how_to_install('math')}")
        case _:
            pass


def _validate_profile(submission: Submission, bounds: Bounds) -> None:
    """A submission that LiveCodeBench's own grader does not support is refused. Its judge looks at the cases."""
    if submission.prelude is not Prelude.NONE and "python" not in submission.languages:
        raise InvalidSubmission("prelude", "needs python")
    if unknown := [name for name in submission.libraries if not name.isidentifier()]:
        raise InvalidSubmission("libraries", f"{unknown[0]!r:.40} is no name of a module")
    if len(submission.libraries) > _MOST_LIBRARIES:
        raise InvalidSubmission("libraries", f"may name at most {_MOST_LIBRARIES}")
    if submission.profile is Profile.PROCESS:
        return
    if submission.files:
        raise InvalidSubmission("profile", f"{submission.profile} does not support further files")
    if set(submission.languages) != {"python"} or not isinstance(submission.tests, StdinTests | CallTests):
        raise InvalidSubmission("profile", f"{submission.profile} grades only python, and only stdin and call tests")
