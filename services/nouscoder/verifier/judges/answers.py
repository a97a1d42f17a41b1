"""Math tests: nothing is run, so the judge only shows; `verifier.mathematics` says whether an answer is right."""

from __future__ import annotations

from nouscoder.domain.submission import MathTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.judges.base import readable
from nouscoder.verifier.sandbox.base import RunResult


class MathJudge:
    """The answer is the submission's text."""

    entry_point: str | None = None
    prelude = ""

    def __init__(self, tests: MathTests) -> None:
        self._cases = tests.cases
        self.num_tests = len(tests.cases)

    def source(self, code: str) -> str:
        """The answer."""
        return code

    def input_size(self, index: int) -> int:
        """The same for all."""
        return 0

    def stdin(self, index: int) -> bytes:
        """Nothing is given to anything."""
        return b""

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """Never accepted without a ruling of the library."""
        return VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """No input, the gold answer, and the answer."""
        return "", self._cases[index].expected, readable(result.stdout)
