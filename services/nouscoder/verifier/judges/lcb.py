"""The profiles `lcb` and `code_gen`: grade a Python program like LiveCodeBench's published grader, with its mistakes.

Source: LiveCodeBench, lcb_runner/evaluation/testing_util.py, as published in May 2025. One process in a sandbox runs
the program on all tests (lcb_driver.py); the comparison happens here, in the gateway. Verdicts for LiveCodeBench's
codes: -2 is wrong_answer, -3 is time_limit_exceeded, -4 is runtime_error (also for code that does not compile), and -1
(the process died) is runtime_error, or time_limit_exceeded if the whole run took more than (limit + 1) per test + 5 s.

code_gen is the server of NeMo Gym (0.4.0) that holds a copy of that grader. There a call's value is also right as a
number, or a text of one, within 1e-8 + 1e-5 of the expected one, and when JSON writes both alike: tuples inside lists.
A program that catches the time limit's exception goes on.

Differences from LiveCodeBench: a returned object with its own `__eq__` is always wrong; memory and output are
limited; the time limit is that of the submission instead of 6 s.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from nouscoder.domain.submission import CallCase, CallTests, JsonValue, Limits, Profile, StdinCase, StdinTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.json_values import give_way, text_json
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.judges.comparators import (
    SMALL_BYTES,
    UnreadableResult,
    has_more_values,
    parse_result,
    result_bound,
    right_values,
    same_as_lcb_prints,
)
from nouscoder.verifier.judges.judge import Judge, beginning, encoded, readable, with_setup
from nouscoder.verifier.sandbox.base import Exit, RunResult

_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
# LiveCodeBench puts this before every program. `"prelude": "lcb"` does so in the process profile.
PRELUDE = (
    "".join(f"from {name} import *\n" for name in f"{_MODULES} builtins typing".split())
    + "".join(f"import {name}\n" for name in _MODULES.split())
    + "sys.setrecursionlimit(50000)\n"
)
_ENTRY = "lcb_grade"
_MAX_RUN_S = 600.0
_LARGE_BYTES = 1_000_000
_LINE_WEIGHT = 10  # of a line of the driver beside the answer
_NUMBER_CHARS = 1000  # of a text that is read as a number


class LcbJudge(Judge):
    """The judge of the lcb profile. One run covers all tests in the order of the request (`split`)."""

    entry_point = _ENTRY
    _cases: Sequence[StdinCase | CallCase]

    def __init__(self, tests: StdinTests | CallTests, limit_s: float, profile: Profile = Profile.LCB) -> None:
        """Reads all cases. Raises InvalidSubmission for those that LiveCodeBench's own grader does not support."""
        super().__init__(tests.cases)
        self._limit_s = math.ceil(limit_s)  # an alarm takes whole seconds
        self._calls = tests if isinstance(tests, CallTests) else None
        self._entry = self._calls.entry_point if self._calls else None
        self._is_code_gen = profile is Profile.CODE_GEN
        given: list[str] = []
        self._expected_json: list[str] = []
        for case in tests.cases:
            if isinstance(case, StdinCase) and case.args:
                raise InvalidSubmission("profile", "lcb does not support program arguments")
            if isinstance(case, CallCase) and case.kwargs:
                raise InvalidSubmission("profile", "lcb does not support keyword arguments")
            for texts, value in zip((given, self._expected_json), _values(case), strict=True):
                texts.append(text_json(value) if isinstance(value, str) else json.dumps(value))
                give_way(len(texts[-1]))
        entry, limit = json.dumps(self._entry), json.dumps(self._limit_s)
        self._batch = f'{{"args": [{entry}, [{", ".join(given)}], {limit}], "kwargs": {{}}}}'.encode()

    def source(self, code: str) -> str:
        """The driver, which holds the code as a string."""
        prelude = with_setup(PRELUDE, self._calls.setup) if self._calls else PRELUDE
        return f"{_driver()}\nPRELUDE = {prelude!r}\nSOURCE = {code!r}\nIS_CODE_GEN = {self._is_code_gen}\n"

    def run_limits(self, limits: Limits) -> Limits:
        """The limits of that process: LiveCodeBench's bound on the whole run, at most ten minutes."""
        whole_s = min(_MAX_RUN_S, (self._limit_s + 1) * self.num_tests + 5.0)
        return replace(limits, wall_time_s=whole_s, cpu_time_s=whole_s)

    def input_size(self, index: int) -> int:
        """The same for all tests, so that they keep the order of the request."""
        return 0

    def stdin(self, index: int) -> bytes:
        """The input of the single process."""
        return self._batch

    async def split(self, whole: RunResult) -> list[RunResult]:
        """Split the run into one result per test. Many bytes are split in a thread, to keep the event loop free."""
        if len(whole.result or b"") > _LARGE_BYTES:
            return await asyncio.to_thread(self.split_now, whole)
        return self.split_now(whole)

    def split_now(self, whole: RunResult) -> list[RunResult]:
        """Split the run into one result per test. A test without a line gets the result of the process."""
        results: list[RunResult] = []
        lines = (whole.result or b"").split(b"\n", self.num_tests)[: self.num_tests]
        for index, line in enumerate(lines):
            result = self._result_of(index, line, whole)
            if result is None:
                break
            results.append(result)
        if whole.exit is Exit.EXITED and whole.exit_code == 0:
            whole = replace(whole, exit_code=1)  # it ended before it reported the next test
        return results + [whole] * (self.num_tests - len(results))

    def _result_of(self, index: int, line: bytes, whole: RunResult) -> RunResult | None:
        result = replace(whole, exit=Exit.EXITED, exit_code=0, signal=0, result=None, stderr=b"", stdout=b"")
        if self._holds_no_answer(index, line):  # so it is not parsed
            return replace(result, stdout=encoded(readable(line)))
        parts = _split_line(line)
        if parts is None:
            return None
        status, output, written, seconds = parts
        result = replace(result, wall_time_s=seconds, cpu_time_s=min(seconds, whole.cpu_time_s))
        match status:
            case "ok":
                text = output if self._entry is None and isinstance(output, str) else written
                return replace(result, stdout=encoded(text))
            case "late":
                return replace(result, exit=Exit.TIME_LIMIT)
            case "error":
                return replace(result, exit_code=1, stderr=encoded(output if isinstance(output, str) else written))
        return None

    def _holds_no_answer(self, index: int, line: bytes) -> bool:
        """Whether a line is longer or has more values than one with a right answer to test `index`."""
        expected = self._expected_json[index]
        most_bytes = _LARGE_BYTES + 4 * len(expected) if self._entry is None else 4096 + result_bound(expected)
        return len(line) > most_bytes or (len(line) > SMALL_BYTES and has_more_values(line, expected, _LINE_WEIGHT))

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """By LiveCodeBench's comparison."""
        _, expected = _values(self._cases[index])
        if self._entry is None and isinstance(expected, str):
            right = same_as_lcb_prints(expected, result.stdout.decode("utf8", "surrogatepass"))
        else:
            try:
                # Plain ==, as in LiveCodeBench: True equals 1, and 0.1 + 0.2 does not equal 0.3.
                value = parse_result(result.stdout, self._expected_json[index])
                wanted = right_values(expected, wrapped=bool(self._calls and self._calls.wrapped))
                right = any(value == one or (self._is_code_gen and _is_close(value, one)) for one in wanted)
            except (UnreadableResult, RecursionError):
                right = False
        return VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """Input, expected and actual output; values as JSON."""
        given, expected = _values(self._cases[index])
        return _shown(given), _shown(expected), readable(result.stdout)


def _values(case: StdinCase | CallCase) -> tuple[JsonValue, JsonValue]:
    """The input and the expected value of a case."""
    if isinstance(case, CallCase):
        return list(case.args), case.expected
    return case.input, case.output


def _is_close(value: object, expected: object) -> bool:
    """As numpy.allclose(float(value), float(expected))."""
    pair = [one for one in (value, expected) if isinstance(one, int | float) or len(str(one)) <= _NUMBER_CHARS]
    try:
        actual, wanted = map(float, pair)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    return actual == wanted or (math.isfinite(wanted) and abs(actual - wanted) <= 1e-8 + 1e-5 * abs(wanted))


def _split_line(line: bytes) -> tuple[object, JsonValue, str, float] | None:
    """A line of the driver: (status, output, output as JSON, seconds). Untrusted: the program may have written it."""
    try:
        status, output, seconds = json.loads(line)
        return status, output, json.dumps(output), max(0.0, min(float(seconds), _MAX_RUN_S))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


@cache
def _driver() -> str:
    return Path(__file__).with_name("lcb_driver.py").read_text("utf-8")


def _shown(value: JsonValue) -> str:
    return value if isinstance(value, str) else beginning(value)
