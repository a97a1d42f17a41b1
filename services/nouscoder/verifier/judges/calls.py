"""Call tests: calls one function and compares the returned value."""

from __future__ import annotations

import json

from nouscoder.domain.submission import CallTests, Comparator, JsonValue
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.json_values import give_way
from nouscoder.verifier.grading.comparators import MIN_BOUND_BYTES, UnreadableResult, parse_result, same_value
from nouscoder.verifier.judges.base import beginning, readable, size_of
from nouscoder.verifier.sandbox.base import RunResult


class CallJudge:
    """The judge of call tests. Their values are JSON."""

    def __init__(self, tests: CallTests, comparator: Comparator, prelude: str = "") -> None:
        self._cases = tests.cases
        self._comparator = comparator
        self.entry_point: str | None = tests.entry_point
        self.prelude = prelude
        self.num_tests = len(tests.cases)

    def source(self, code: str) -> str:
        """The code itself."""
        return code

    def input_size(self, index: int) -> int:
        """The number of bytes of the arguments as JSON."""
        return size_of(self._cases, index)

    def stdin(self, index: int) -> bytes:
        """The arguments as JSON, in the format of sandbox.base.Program."""
        case = self._cases[index]
        give_way(size_of(self._cases, index))
        return json.dumps({"args": list(case.args), "kwargs": case.kwargs}).encode()

    def arguments(self, index: int) -> tuple[str, ...]:
        """None."""
        return ()

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """Accepted when the returned value equals the expected one; runtime error when the call did not return."""
        if result.result is None:
            return VerdictKind.RUNTIME_ERROR
        expected = self._cases[index].expected
        # A shorter result is within the bound of any expected value. Writing a large one takes a long time.
        give_way(len(result.result))
        expected_json = json.dumps(expected) if len(result.result) > MIN_BOUND_BYTES else ""
        give_way(len(result.result))
        try:
            value = parse_result(result.result, expected_json)
        except UnreadableResult:
            return VerdictKind.WRONG_ANSWER
        comparator = self._comparator
        right = same_value(expected, value, comparator.absolute, comparator.relative)
        return VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """Arguments, expected and returned value as JSON; stdout instead if the call did not return."""
        returned = result.stdout if result.result is None else result.result
        case = self._cases[index]
        given: JsonValue = {"args": list(case.args), "kwargs": dict(case.kwargs)}
        return beginning(given), beginning(case.expected), readable(returned)
