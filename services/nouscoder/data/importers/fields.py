"""Reading the fields of a row, shared by the formats. Each function raises Rejected naming what it did not find."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from nouscoder.data.problems import Reference
from nouscoder.domain.submission import CallCase, CallTests, StdinCase, StdinTests
from nouscoder.formats.json_values import json_value


class Reason(StrEnum):
    """The kinds of reasons, for the summary."""

    NOT_JSON = "not_json"
    MISSING_FIELD = "missing_field"
    MALFORMED = "malformed"
    NO_TESTS = "no_tests"
    NO_ANSWER = "no_answer"
    UNREADABLE_TESTS = "unreadable_tests"
    UNSAFE_PICKLE = "unsafe_pickle"
    TOO_LARGE = "too_large"
    NEEDS_FILES = "needs_files"
    NOT_VERIFIABLE = "not_verifiable"
    UNSUPPORTED = "unsupported"
    DUPLICATE_ID = "duplicate_id"


class Rejected(Exception):
    """The row is not imported. The text says what is wrong with it."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


Row = Mapping[str, Any]
MAX_REFERENCES = 8  # reference solutions kept of each problem
_SCALARS = (str, int, float)


def text(row: Row, *names: str) -> str:
    """The first of these fields that holds text."""
    for name in names:
        if isinstance(row.get(name), str) and row[name].strip():
            return str(row[name])
    raise Rejected(Reason.MISSING_FIELD, f"none of the fields {', '.join(names)} has text")


def optional_text(row: Row, *names: str) -> str:
    """The first of these fields that holds text or a number, as text; else empty."""
    for name in names:
        value = row.get(name)
        if isinstance(value, _SCALARS) and not isinstance(value, bool) and str(value).strip():
            return str(value)
    return ""


def decoded(value: Any) -> Any:
    """A value that a data set keeps as JSON or as a Python literal in a string; any other value as it is."""
    if not isinstance(value, str):
        return value
    for read in (json_value, json.loads):  # the second one also takes half of a surrogate pair, which is rare
        try:
            return read(value)
        except (ValueError, RecursionError):
            continue
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise Rejected(Reason.UNREADABLE_TESTS, f"neither JSON nor a Python literal: {value[:60]!r}") from None


def joined_lines(value: Any) -> str:
    """An input or output: text, or a list of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise Rejected(Reason.UNREADABLE_TESTS, f"neither text nor a list of lines: {value!r:.60}")


def pairs(inputs: Any, outputs: Any) -> list[tuple[Any, Any]]:
    """Inputs and outputs as pairs."""
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise Rejected(Reason.UNREADABLE_TESTS, "inputs and outputs are not two lists of the same length")
    if not inputs:
        raise Rejected(Reason.NO_TESTS, "there is no test")
    return list(zip(inputs, outputs, strict=True))


def stdin_tests(found: Iterable[tuple[Any, Any]]) -> StdinTests:
    """Tests of a whole program from (input, output)."""
    cases = tuple(StdinCase(joined_lines(given), joined_lines(wanted)) for given, wanted in found)
    if not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test")
    return StdinTests(cases)


def call_tests(entry_point: str, found: Iterable[tuple[Any, Any]]) -> CallTests:
    """Tests of a function from (positional arguments, result)."""
    cases = []
    for args, expected in found:
        if not isinstance(args, list | tuple):
            raise Rejected(Reason.UNREADABLE_TESTS, f"the arguments are not a list: {args!r:.60}")
        cases.append(CallCase(tuple(plain(arg) for arg in args), {}, plain(expected)))
    if not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test")
    return CallTests(entry_point.removeprefix("Solution().").removeprefix("Solution."), tuple(cases))


def plain(value: Any) -> Any:
    """A Python literal as a JSON value: a tuple becomes a list. Sets, bytes and keys that are not text are refused."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(each) for key, each in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise Rejected(Reason.UNREADABLE_TESTS, f"not a JSON value: {value!r:.60}")


def references(value: Any, language: str = "python") -> tuple[Reference, ...]:
    """Reference solutions: a text, a list of texts, or a list of these as JSON."""
    try:
        found = decoded(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    except Rejected:
        found = value
    programs = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    kept = [program for program in programs if isinstance(program, str) and program.strip()]
    return tuple(Reference(unfenced(program), language) for program in kept[:MAX_REFERENCES])


def unfenced(program: str) -> str:
    """A program without the fence of a Markdown block around it."""
    lines = program.strip().splitlines()
    if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].startswith("```"):
        return "\n".join(lines[1:-1]) + "\n"
    return program


def with_starter_code(question: str, starter_code: str) -> str:
    """The question, followed by the code to begin with, if there is any."""
    if not starter_code.strip():
        return question
    return f"{question.rstrip()}\n\nBegin with this code:\n```python\n{starter_code.strip()}\n```\n"
