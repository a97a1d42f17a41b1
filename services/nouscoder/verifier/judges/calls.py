"""Call tests: calls one function and compares the returned value."""

from __future__ import annotations

import json

from nouscoder.domain.submission import CallTests, Comparator
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.comparators import UnreadableResult, parse_result, result_bound, same_value
from nouscoder.verifier.judges.base import readable
from nouscoder.verifier.sandbox.base import RunResult


class CallJudge:
    """The judge of call tests. Raises ValueError or RecursionError for values that cannot be encoded as JSON."""

    def __init__(self, tests: CallTests, comparator: Comparator, prelude: str = "") -> None:
        self._cases = tests.cases
        self._comparator = comparator
        self.entry_point: str | None = tests.entry_point
        self.prelude = prelude
        self.num_tests = len(tests.cases)
        self._stdin = [json.dumps({"args": list(c.args), "kwargs": c.kwargs}).encode() for c in tests.cases]
        self._expected = [json.dumps(c.expected) for c in tests.cases]

    def source(self, code: str) -> str:
        """The code itself."""
        return code

    def input_size(self, index: int) -> int:
        """The number of bytes of the arguments as JSON."""
        return len(self._stdin[index])

    def stdin(self, index: int) -> bytes:
        """The arguments as JSON, in the format of sandbox.base.Program."""
        return self._stdin[index]

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """Accepted when the returned value equals the expected one; runtime error when the call did not return."""
        if result.result is None:
            return VerdictKind.RUNTIME_ERROR
        try:
            value = parse_result(result.result, max_bytes=result_bound(self._expected[index]))
        except UnreadableResult:
            return VerdictKind.WRONG_ANSWER
        comparator = self._comparator
        right = same_value(self._cases[index].expected, value, comparator.absolute, comparator.relative)
        return VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """Arguments, expected and returned value as JSON; stdout instead if the call did not return."""
        returned = result.stdout if result.result is None else result.result
        return readable(self._stdin[index]), self._expected[index], readable(returned)
