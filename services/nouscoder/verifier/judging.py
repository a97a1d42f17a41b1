"""From what a process did (RunResult) to what its test got (an outcome). Pure.

One judge a type of tests: it knows what a process is given, what is expected of it, and how to show both. A new type
of tests is a new judge and a line in `judge_for`.
"""

from __future__ import annotations

import json
from typing import Protocol

from nouscoder.submission import CallTests, Comparator, StdinTests, Submission
from nouscoder.verdict import FirstFailure, VerdictKind
from nouscoder.verifier.comparators import UnreadableResult, parse_result, result_bound, same_text, same_value
from nouscoder.verifier.sandbox.base import Exit, RunResult
from nouscoder.verifier.validation import InvalidSubmission

CLIP_CHARS = 2000

_ENDED_BADLY = {
    Exit.SIGNALLED: VerdictKind.RUNTIME_ERROR,
    Exit.TIME_LIMIT: VerdictKind.TIME_LIMIT_EXCEEDED,
    Exit.MEMORY_LIMIT: VerdictKind.MEMORY_LIMIT_EXCEEDED,
    Exit.OUTPUT_LIMIT: VerdictKind.OUTPUT_LIMIT_EXCEEDED,
}


class Judge(Protocol):
    """The tests of one submission."""

    entry_point: str | None
    num_tests: int

    def input_size(self, index: int) -> int:
        """How long the input of test `index` is: the guess of how hard it is."""
        ...

    def stdin(self, index: int) -> bytes:
        """What the process of test `index` is given. Never anything of what is expected."""
        ...

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """The outcome of a process that ended by itself with exit code 0."""
        ...

    def shown(self, index: int, result: RunResult) -> tuple[str, str]:
        """(expected, output) of test `index` as text for people."""
        ...


def judge_for(submission: Submission) -> Judge:
    """The judge of a submission's tests. Raises InvalidSubmission when they cannot be written as JSON."""
    if isinstance(submission.tests, StdinTests):
        return StdinJudge(submission.tests, submission.comparator)
    try:
        return CallJudge(submission.tests, submission.comparator)
    except (RecursionError, ValueError) as error:
        raise InvalidSubmission("tests.cases", f"a value cannot be passed on: {error}") from None


def outcome_of(judge: Judge, index: int, result: RunResult) -> VerdictKind:
    """What test `index` got. A non-zero exit code is a runtime error even after the right answer."""
    if result.exit is not Exit.EXITED:
        return _ENDED_BADLY[result.exit]
    if result.exit_code != 0:
        return VerdictKind.RUNTIME_ERROR
    return judge.answer_outcome(index, result)


def failure_of(judge: Judge, index: int, outcome: VerdictKind, result: RunResult) -> FirstFailure:
    """A failure as it may leave the service: texts clipped, the end of stderr kept."""
    expected, output = judge.shown(index, result)
    return FirstFailure(
        index=index,
        outcome=outcome,
        input=_clip(_text(judge.stdin(index)[: 4 * CLIP_CHARS])),
        expected=_clip(expected),
        output=_clip(output),
        stderr=_text(result.stderr[-4 * CLIP_CHARS :])[-CLIP_CHARS:],
    )


class StdinJudge:
    """Whole programs: stdin in, stdout compared."""

    def __init__(self, tests: StdinTests, comparator: Comparator) -> None:
        self._cases = tests.cases
        self._comparator = comparator
        self.entry_point: str | None = None
        self.num_tests = len(tests.cases)

    def input_size(self, index: int) -> int:
        """Characters of the input."""
        return len(self._cases[index].input)

    def stdin(self, index: int) -> bytes:
        """The case's input."""
        return self._cases[index].input.encode("utf8", "surrogatepass")

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """Accepted when stdout is the expected output."""
        right = same_text(self._cases[index].output, result.stdout, self._comparator)
        return VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str]:
        """Expected output and stdout."""
        return self._cases[index].output, _text(result.stdout[: 4 * CLIP_CHARS])


class CallJudge:
    """One function: arguments in, the returned value compared."""

    def __init__(self, tests: CallTests, comparator: Comparator) -> None:
        self._cases = tests.cases
        self._tolerance = comparator.float_tolerance
        self.entry_point: str | None = tests.entry_point
        self.num_tests = len(tests.cases)
        self._stdin = [json.dumps({"args": list(c.args), "kwargs": c.kwargs}).encode() for c in tests.cases]
        self._expected = [json.dumps(c.expected) for c in tests.cases]

    def input_size(self, index: int) -> int:
        """Bytes of the arguments as JSON."""
        return len(self._stdin[index])

    def stdin(self, index: int) -> bytes:
        """The arguments as JSON, in the shape that the harness reads (sandbox.base.Program)."""
        return self._stdin[index]

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """Accepted when the returned value is the expected one; a runtime error when nothing was returned."""
        if result.result is None:
            return VerdictKind.RUNTIME_ERROR
        expected = self._cases[index].expected
        try:
            value = parse_result(result.result, max_bytes=result_bound(self._expected[index]))
        except UnreadableResult:
            return VerdictKind.WRONG_ANSWER
        right = same_value(expected, value, self._tolerance)
        return VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str]:
        """Expected and returned value as JSON; the program's stdout when it returned nothing."""
        returned = result.stdout if result.result is None else result.result
        return self._expected[index], _text(returned[: 4 * CLIP_CHARS])


def _text(data: bytes) -> str:
    return data.decode("utf8", "replace")


def _clip(text: str) -> str:
    return text if len(text) <= CLIP_CHARS else text[:CLIP_CHARS] + "..."
