"""Math tests. No process runs, so this judge only shows the answer; `judges.mathematics` compares it."""

from __future__ import annotations

from nouscoder.domain.submission import MathTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.judges.base import readable
from nouscoder.verifier.sandbox.base import RunResult


class MathJudge:
    """The judge of math tests. The answer is the text of the submission."""

    entry_point: str | None = None
    prelude = ""

    def __init__(self, tests: MathTests) -> None:
        self._cases = tests.cases
        self.num_tests = len(tests.cases)

    def source(self, code: str) -> str:
        """The answer."""
        return code

    def input_size(self, index: int) -> int:
        """The same for all tests."""
        return 0

    def stdin(self, index: int) -> bytes:
        """Empty: no process runs."""
        return b""

    def arguments(self, index: int) -> tuple[str, ...]:
        """None."""
        return ()

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """A wrong answer. Only the math library's ruling accepts an answer."""
        return VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """No input, the gold answer, the submitted answer."""
        return "", self._cases[index].expected, readable(result.stdout)
