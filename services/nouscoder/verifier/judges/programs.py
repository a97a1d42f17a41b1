"""Tests of whole programs: stdout is compared, or passed to a checker or an interactor."""

from __future__ import annotations

from nouscoder.domain.submission import CheckerTests, Comparator, InteractiveTests, StdinTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.comparators import same_text
from nouscoder.verifier.judges.base import encoded, readable, size_of
from nouscoder.verifier.sandbox.base import RunResult


class StdinJudge:
    """The judge of stdin, checker and interactive tests. A checker or interactor replaces the comparison."""

    entry_point: str | None = None

    def __init__(
        self, tests: StdinTests | CheckerTests | InteractiveTests, comparator: Comparator, prelude: str = ""
    ) -> None:
        self._cases = tests.cases
        self._comparator = comparator
        self._compares = isinstance(tests, StdinTests)
        self.prelude = prelude
        self.num_tests = len(tests.cases)

    def source(self, code: str) -> str:
        """The code itself."""
        return code

    def input_size(self, index: int) -> int:
        """The number of characters of the input."""
        return size_of(self._cases, index)

    def stdin(self, index: int) -> bytes:
        """The input of the case."""
        return encoded(self._cases[index].input)

    def arguments(self, index: int) -> tuple[str, ...]:
        """The arguments of the case."""
        return self._cases[index].args

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """Accepted when stdout matches the expected output, or when a checker or interactor decides."""
        if not self._compares:
            return VerdictKind.ACCEPTED
        right = same_text(self._cases[index].output, result.stdout, self._comparator)
        return VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """Input, expected output and stdout."""
        case = self._cases[index]
        return case.input, case.output, readable(result.stdout)
