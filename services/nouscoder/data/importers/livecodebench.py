"""LiveCodeBench (livecodebench/code_generation_lite), and the form of its tests, which other sets use too.

Rows have question_title, question_content, platform, question_id, contest_id, contest_date, starter_code, difficulty,
public_test_cases (JSON), private_test_cases (JSON, or base64 of zlib of a pickle of JSON) and metadata (JSON).
Source: lcb_runner/benchmarks/code_generation.py. LiveCodeBench's prompt is a form (domain/prompt.py).

A pickle of another thing than one text is refused without running anything. It is never loaded. Its operations are
listed (pickletools.genops), and only those that a pickled text consists of are allowed; operations that import names or
call them are among the others.
"""

from __future__ import annotations

import base64
import json
import pickletools
import warnings
from typing import Any

from nouscoder.data.bounded_files import FileTooLarge, unpacked
from nouscoder.data.importers.fields import (
    Reason,
    Rejected,
    Row,
    call_tests,
    decoded,
    facts_of,
    optional_text,
    shown,
    stdin_tests,
    text,
)
from nouscoder.data.importers.rows import Format
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallTests, Limits, Prelude, Profile, StdinTests

MAX_UNPACKED_BYTES = 1024**3  # of one row's private tests
_TEXT = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_HARMLESS = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})


class UnsafePickle(ValueError):
    """The pickle holds something other than one text. The text names the operation."""


def text_of_pickle(data: bytes) -> str:
    """The text. Raises UnsafePickle, and ValueError for data that is not a whole pickle."""
    found: str | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of wrong escapes in operations that are refused
        for operation, argument, position in pickletools.genops(data):
            if operation.name in _TEXT and found is None:
                found = str(argument)
            elif operation.name not in _HARMLESS:
                raise UnsafePickle(f"operation {operation.name} at byte {position}: only one text is allowed")
    if found is None:
        raise UnsafePickle("the pickle holds no text")
    return found


LCB_LIMITS = Limits(wall_time_s=6.0, cpu_time_s=6.0)  # lcb_runner/runner/parser.py: --timeout 6


def read_livecodebench(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row, judged as published. Its id is the question_id, as in LiveCodeBench's sample files."""
    problem = Problem(
        problem_id=text(row, "question_id"),
        prompt=text(row, "question_content"),
        starter_code=optional_text(row, "starter_code"),
        tests=_lcb_tests(row, "public_test_cases", "private_test_cases"),
        public_tests=(
            shown(_lcb_tests(row, "public_test_cases")) if packed_cases(row.get("public_test_cases")) else None
        ),
        limits=LCB_LIMITS,
        prelude=Prelude.LCB,
        profile=Profile.LCB,
        difficulty=optional_text(row, "difficulty"),
        source="livecodebench",
        family=optional_text(row, "platform"),
    )
    facts = facts_of(row, "contest_date", "platform", "contest_id", "question_title")
    return ReferencedProblem(problem, metadata=facts)


def _lcb_tests(row: Row, *names: str) -> StdinTests | CallTests:
    cases = [case for name in names for case in packed_cases(row.get(name))]
    return lcb_tests(cases, decoded(row.get("metadata") or "{}"))


def lcb_tests(cases: list[Any], metadata: Any) -> StdinTests | CallTests:
    """Tests of LiveCodeBench's form: {input, output, testtype}. A function's arguments are JSON, one a line."""
    kinds = {case.get("testtype") or "stdin" for case in cases}
    found = [(case["input"], case["output"]) for case in cases]
    if kinds <= {"stdin", "stdin_stdout"}:
        return stdin_tests(found)
    if kinds != {"functional"}:
        raise Rejected(Reason.UNREADABLE_TESTS, f"tests of the types {sorted(kinds)}")
    entry_point = metadata.get("func_name") if isinstance(metadata, dict) else None
    if not entry_point:
        raise Rejected(Reason.MISSING_FIELD, "metadata has no func_name")
    try:
        calls = [([json.loads(line) for line in given.split("\n")], json.loads(wanted)) for given, wanted in found]
    except ValueError as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"an argument or a result is not JSON: {error}") from None
    return call_tests(entry_point, calls)


def packed_cases(value: Any) -> list[Any]:
    """The list of tests that a field holds: as it is, as JSON, or as base64 of zlib of a pickle of JSON."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = _unpacked(value) if value.strip() else "[]"
    cases = decoded(value if value is not None else [])
    if not isinstance(cases, list):
        raise Rejected(Reason.UNREADABLE_TESTS, "the tests are not a list")
    return cases


def _unpacked(packed: str) -> str:
    try:
        return text_of_pickle(unpacked(base64.b64decode(packed, validate=True), MAX_UNPACKED_BYTES))
    except UnsafePickle as error:
        raise Rejected(Reason.UNSAFE_PICKLE, str(error)) from None
    except FileTooLarge as error:
        raise Rejected(Reason.TOO_LARGE, f"the private tests cannot be unpacked: {error}") from None
    except ValueError as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"the private tests cannot be unpacked: {error}") from None


FORMATS = {"livecodebench": Format(read_livecodebench, "LiveCodeBench, code_generation_lite")}
