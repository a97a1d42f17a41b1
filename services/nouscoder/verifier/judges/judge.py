"""The base of judges, the judges that compare an output with an expected one, and what all judges share.

A judge knows the input of a process, the expected output, and how to show both. `outcome_of` turns the result of a
process into the outcome of its test.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nouscoder.domain.submission import (
    CallCase,
    CallTests,
    CheckerTests,
    Comparator,
    ComparatorKind,
    InteractiveTests,
    JsonValue,
    StdinCase,
    StdinTests,
    Tests,
    TestsReference,
    input_size,
)
from nouscoder.domain.verdict import FirstFailure, VerdictKind
from nouscoder.formats.json_values import give_way, without_collections
from nouscoder.http_server.fair_queue import OneThread
from nouscoder.store.case_files import StoredCases
from nouscoder.verifier.judges.comparators import (
    MIN_BOUND_BYTES,
    UnreadableResult,
    parse_result,
    right_values,
    same_text,
    same_value,
)
from nouscoder.verifier.judges.users_comparators import same_for_user
from nouscoder.verifier.sandbox.base import Exit, RunResult

Result = TypeVar("Result")
CLIP_CHARS = 2000
_LONG_BYTES = 64 * 1024
_ENDED_BADLY = {
    Exit.SIGNALLED: VerdictKind.RUNTIME_ERROR,
    Exit.TIME_LIMIT: VerdictKind.TIME_LIMIT_EXCEEDED,
    Exit.MEMORY_LIMIT: VerdictKind.MEMORY_LIMIT_EXCEEDED,
    Exit.OUTPUT_LIMIT: VerdictKind.OUTPUT_LIMIT_EXCEEDED,
}


def takes_long(tests: Tests | TestsReference, index: int) -> bool:
    """Whether reading or writing this case would stall the event loop. Cases in memory come from light bodies."""
    if isinstance(tests, TestsReference) or not isinstance(tests.cases, StoredCases):
        return False
    return tests.cases.text_bytes(index) > _LONG_BYTES


thread = OneThread("long work")


async def in_turn(act: Callable[..., Result], *arguments: object) -> Result:
    """The result of `act`, a work with one large case. At most one is in progress, in a thread of its own.

    The garbage collector is off meanwhile: it would look at all the values again and again. Raises what `act` raises,
    and QueueFull when it began too late.
    """
    return await thread.run(_without_collections, act, *arguments)


def _without_collections(act: Callable[..., Result], *arguments: object) -> Result:
    with without_collections():
        return act(*arguments)


def readable(data: bytes) -> str:
    """The beginning of untrusted bytes as text."""
    return data[: 4 * CLIP_CHARS].decode("utf8", "replace")


def beginning(value: JsonValue) -> str:
    """The beginning of a value as JSON, at least CLIP_CHARS + 1 characters of a longer one."""
    text = ""
    for part in json.JSONEncoder().iterencode(value):
        text += part
        if len(text) > CLIP_CHARS:
            break
    return text


def encoded(text: str) -> bytes:
    """The bytes of a text for a process. Lone surrogates are encoded as bytes that are not valid UTF-8."""
    return text.encode("utf8", "surrogatepass")


class Judge(ABC):
    """The tests of one submission. `prelude` is Python that runs in the program's namespace before the program."""

    entry_point: str | None = None

    def __init__(self, cases: Sequence[Any], prelude: str = "") -> None:
        self._cases = cases
        self.prelude = prelude
        self.num_tests = len(cases)

    def source(self, code: str) -> str:
        """The program to run for this code: the code itself, or the code with additions."""
        return code

    def input_size(self, index: int) -> int:
        """The length of the input of test `index`, an estimate of how hard it is. Stored cases are not read."""
        return (
            self._cases.input_sizes[index] if isinstance(self._cases, StoredCases) else input_size(self._cases[index])
        )

    @abstractmethod
    def stdin(self, index: int) -> bytes:
        """The input of the process of test `index`. It contains nothing of the expected output."""

    def arguments(self, index: int) -> tuple[str, ...]:
        """The arguments of the process of test `index`."""
        return ()

    @abstractmethod
    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """The outcome of a process that exited with code 0."""

    @abstractmethod
    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """(input, expected, output) of test `index` as readable text."""


class StdinJudge(Judge):
    """The judge of stdin, checker and interactive tests. A checker or interactor replaces the comparison."""

    _cases: Sequence[StdinCase]

    def __init__(
        self, tests: StdinTests | CheckerTests | InteractiveTests, comparator: Comparator, prelude: str = ""
    ) -> None:
        super().__init__(tests.cases, prelude)
        self._comparator = comparator
        self._compares = isinstance(tests, StdinTests)

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
        compare = same_for_user if self._comparator.kind is ComparatorKind.ENTRY_POINT else same_text
        right = compare(self._cases[index].output, result.stdout, self._comparator)
        return VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """Input, expected output and stdout."""
        case = self._cases[index]
        return case.input, case.output, readable(result.stdout)


def with_setup(prelude: str, setup: str) -> str:
    """The prelude, then the setup, which is compiled on its own where it imports __future__: that has to come first."""
    return f"{prelude}\nexec({setup!r})\n" if "__future__" in setup else f"{prelude}\n{setup}\n"


class CallJudge(Judge):
    """The judge of call tests: the returned value is compared. Values are JSON."""

    _cases: Sequence[CallCase]

    def __init__(self, tests: CallTests, comparator: Comparator, prelude: str = "") -> None:
        super().__init__(tests.cases, with_setup(prelude, tests.setup) if tests.setup else prelude)
        self._comparator = comparator
        self._is_wrapped = tests.wrapped
        self.entry_point = tests.entry_point

    def stdin(self, index: int) -> bytes:
        """The arguments as JSON, in the format of sandbox.base.Program."""
        case = self._cases[index]
        give_way(self.input_size(index))
        return json.dumps({"args": list(case.args), "kwargs": case.kwargs}).encode()

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
        tolerances = (self._comparator.absolute, self._comparator.relative)
        wanted = right_values(expected, wrapped=self._is_wrapped)
        right = any(same_value(one, value, *tolerances) for one in wanted)
        return VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """Arguments, expected and returned value as JSON; stdout instead if the call did not return."""
        returned = result.stdout if result.result is None else result.result
        case = self._cases[index]
        given: JsonValue = {"args": list(case.args), "kwargs": dict(case.kwargs)}
        return beginning(given), beginning(case.expected), readable(returned)


def outcome_of(judge: Judge, index: int, result: RunResult) -> VerdictKind:
    """The outcome of test `index`. A non-zero exit code is a runtime error even after a correct answer."""
    if result.exit is not Exit.EXITED:
        return _ENDED_BADLY[result.exit]
    if result.exit_code != 0:
        return VerdictKind.RUNTIME_ERROR
    return judge.answer_outcome(index, result)


def failure_of(judge: Judge, index: int, outcome: VerdictKind, result: RunResult, remark: str = "") -> FirstFailure:
    """A failure as the service reports it: texts clipped, the end of stderr, then the checker's remark."""
    test_input, expected, output = judge.shown(index, result)
    stderr = stderr_of(result)
    if remark:
        stderr = f"{stderr}\n[judge] {remark}".lstrip("\n")
    return FirstFailure(
        index=index,
        outcome=outcome,
        input=_clip(test_input),
        expected=_clip(expected),
        output=_clip(output),
        stderr=stderr[-CLIP_CHARS:],
    )


def stderr_of(result: RunResult) -> str:
    """The end of what the program wrote to stderr."""
    return result.stderr[-4 * CLIP_CHARS :].decode("utf8", "replace")[-CLIP_CHARS:]


def _clip(text: str) -> str:
    return text if len(text) <= CLIP_CHARS else text[:CLIP_CHARS] + "..."
