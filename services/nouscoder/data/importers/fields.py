"""Reading the fields of a row, shared by the formats. Each function raises Rejected naming what it did not find."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from enum import StrEnum
from typing import Any

from nouscoder.data.bounded_files import FileRefused
from nouscoder.data.json_records import bounded_json
from nouscoder.data.problems import Reference, fit_in_a_task
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
    Tests,
    method_name,
)
from nouscoder.formats.json_values import RepeatedKey


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
    UNGRADABLE = "ungradable"
    OTHER_LANGUAGE = "other_language"
    DUPLICATE_ID = "duplicate_id"
    SEVERAL_TURNS = "several_turns"
    NO_DATE = "no_date"
    OUTSIDE_DATES = "outside_dates"


class Rejected(Exception):
    """The row is not imported. The text says what is wrong with it."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


Row = Mapping[str, Any]
MAX_REFERENCES = 8  # reference solutions kept of each problem
QUESTIONS, ANSWERS = ("question", "input", "prompt"), ("answer", "target")  # of generated reasoning tasks
_SYSTEM = "system"
_SCALARS = (str, int, float)
_MAX_DIGITS = 4300  # the limit of Python and of pydantic
_TOO_LONG = 10**_MAX_DIGITS
_SHORT_LITERAL = 1024**2
_MAX_PROGRAM = 8 * 1024**2
_TEXT_LITERAL = re.compile(r"""'(?:[^'\\\n]|\\[\s\S])*'?|"(?:[^"\\\n]|\\[\s\S])*"?""")
_STRANGE_TEXT = re.compile(r"[\w\0]\0|#")  # a prefix such as f, three quotes, or a comment


def text(row: Row, *names: str) -> str:
    """The first of these fields that holds text."""
    for name in names:
        if isinstance(row.get(name), str) and row[name].strip():
            return str(row[name])
    raise Rejected(Reason.MISSING_FIELD, f"none of the fields {', '.join(names)} has text")


def optional_text(row: Row, *names: str) -> str:
    """The first of these fields that holds text, a number or a date, as text; else empty. NaN is a missing value."""
    for name in names:
        value = row.get(name)
        value = value.isoformat() if isinstance(value, date) else value
        if isinstance(value, _SCALARS) and not isinstance(value, bool) and str(value).strip() and value == value:
            return str(value)
    return ""


def facts_of(row: Row, *names: str) -> dict[str, str]:
    """The fields that hold text or a number, as text."""
    values = {name: optional_text(row, name) for name in names}
    return {name: value for name, value in values.items() if value}


def asked_of(row: Row, *names: str) -> tuple[str, dict[str, str]]:
    """The question in the first of these fields that has a value, and facts about it for the metadata.

    It is text, or the messages of a chat, also as JSON. A system message goes before the user's, and a fact says so.
    Raises Rejected for a conversation of several turns, because a problem is asked in one, and for pictures.
    """
    if lost := next((one for one in ("image", "images") if row.get(one) and not isinstance(row[one], str)), ""):
        raise Rejected(Reason.NEEDS_FILES, f"the question has pictures in {lost}, and a problem is text")
    name = next((name for name in names if row.get(name)), names[0])
    messages = row.get(name)
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        with suppress(Rejected):
            messages = decoded(messages)
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        return text(row, *names), {}
    if not all("role" in one for one in messages):
        raise Rejected(Reason.MISSING_FIELD, f"{name} is a list of records without `role`, which no messages are")
    roles = [_SYSTEM if one["role"] == "developer" else str(one["role"]) for one in messages]
    if (turns := [role for role in roles if role != _SYSTEM]) not in ([], ["user"]):
        way = f"--column {name}={name}.-1.content takes the last message alone"
        raise Rejected(Reason.SEVERAL_TURNS, f"{name} has the messages {', '.join(turns):.200}: {way}")
    contents = [_content(one.get("content")) for one in sorted(messages, key=lambda one: one["role"] == "user")]
    if "user" not in turns or not contents[-1].strip():
        raise Rejected(Reason.MISSING_FIELD, f"no message of the user in {name} has text")
    return "\n\n".join(filter(None, contents)), {"roles": "system, user"} if any(contents[:-1]) else {}


def _content(content: Any) -> str:
    """The text of a message: text, or parts of text. Raises Rejected for another part, such as a picture."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if lost := [part for part, found in zip(content, texts, strict=True) if not isinstance(found, str)]:
        raise Rejected(Reason.NEEDS_FILES, f"a part of a message is no text: {lost[0]!r:.80}")
    return "\n".join(map(str, texts))


def at_path(row: Row, path: str) -> Any:
    """The value of a column, or of a field inside one: `reward_model.ground_truth`, `prompt.0.content`; else None."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, Sequence) and not isinstance(value, str) and name.lstrip("-").isdecimal():
            value = value[int(name)] if -len(value) <= int(name) < len(value) else None
        else:
            return None
    return value


def decoded(value: Any) -> Any:
    """A value that a data set keeps as JSON or as a Python literal in a string; any other value as it is."""
    if not isinstance(value, str):
        return value
    for read in (bounded_json, json.loads):  # the second one also takes half of a surrogate pair, which is rare
        try:
            return read(value)
        except FileRefused as error:
            raise Rejected(Reason.TOO_LARGE, str(error)) from None
        except RepeatedKey as error:
            raise Rejected(Reason.UNREADABLE_TESTS, str(error)) from None
        except (ValueError, RecursionError) as error:
            _refuse_long_integer(error)
    _refuse_many_nodes(value)
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        _refuse_long_integer(error)
        raise Rejected(Reason.UNREADABLE_TESTS, f"neither JSON nor a Python literal: {value[:60]!r}") from None


def _refuse_long_integer(error: Exception) -> None:
    """Python converts no longer integers, because that takes quadratic time, and neither does the store of tests."""
    if "integer string conversion" in str(error):
        raise Rejected(Reason.TOO_LARGE, f"an integer has more than {_MAX_DIGITS} digits") from None


def _refuse_many_nodes(literal: str) -> None:
    """Raises Rejected for a Python literal that is long beside its texts: reading takes 470 bytes for each character.

    A long one must be made of plain texts, whose ends are known without reading it as Python.
    """
    if len(literal) <= _SHORT_LITERAL:
        return
    rest = _TEXT_LITERAL.sub("\0", literal)
    if len(rest) > _SHORT_LITERAL or _STRANGE_TEXT.search(rest):
        raise Rejected(Reason.TOO_LARGE, f"a Python literal of {len(literal)} characters, which is not JSON")


def parsed_python(code: object) -> ast.Module:
    """The syntax tree of a test program. Raises Rejected."""
    if not isinstance(code, str):
        raise Rejected(Reason.UNREADABLE_TESTS, "the tests are not text")
    if len(code) > _MAX_PROGRAM:
        raise Rejected(Reason.TOO_LARGE, f"the tests are a program of {len(code)} characters")
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        _refuse_long_integer(error)
        raise Rejected(Reason.UNREADABLE_TESTS, f"the tests are not python: {error}") from None


def imported_libraries(programs: Iterable[str], *own: str) -> tuple[str, ...]:
    """The modules beyond the standard library that programs import, without their `own`. Raises Rejected."""
    names = dict.fromkeys(
        name.partition(".")[0]
        for program in programs
        if "import" in program
        for node in ast.walk(parsed_python(program))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    )
    known = {"", "main", "__main__", *own} | sys.stdlib_module_names
    return tuple(name for name in names if name not in known)


def with_libraries(problem: Problem) -> Problem:
    """The problem with what its tests in Python import: a library that is missing is no fault of a program.

    Raises Rejected for a case that nothing can fail, such as `def check(candidate): pass`.
    """
    tests = problem.tests
    if problem.languages != ("python",) or not isinstance(tests, CallTests | AssertTests):
        return problem
    cases = tests.cases if isinstance(tests, AssertTests) and not tests.module else ()
    module = tests.module if isinstance(tests, AssertTests) else ""
    if vacuous := next((case for case in cases if not re.search("assert|raise|exit|fail", tests.setup + case)), ""):
        raise Rejected(Reason.NO_TESTS, f"a test asserts nothing: {vacuous[:100]!r}")
    found = imported_libraries([tests.setup, *cases], module)
    return replace(problem, libraries=tuple(dict.fromkeys((*problem.libraries, *found))))


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


def shown(tests: Tests) -> Tests | None:
    """Examples as public tests; None when they are too large for that."""
    return tests if fit_in_a_task(tests) else None


def verified_answer(info: Row) -> MathTests:
    """The answer in the field verification_info of PrimeIntellect's sets."""
    if not (answer := optional_text(info, "ground_truth")):
        raise Rejected(Reason.NO_ANSWER, "verification_info has no ground_truth")
    return MathTests((MathCase(answer),))


def call_tests(entry_point: str, found: Iterable[tuple[Any, Any]], *, wrapped: bool = False) -> CallTests:
    """Tests of a function from (positional arguments, result)."""
    cases = []
    for args, expected in found:
        if not isinstance(args, list | tuple):
            raise Rejected(Reason.UNREADABLE_TESTS, f"the arguments are not a list: {args!r:.60}")
        cases.append(CallCase(tuple(plain(arg, is_argument=True) for arg in args), {}, plain(expected)))
    if not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test")
    return CallTests(method_name(entry_point), tuple(cases), wrapped=wrapped)


def plain(value: Any, *, is_argument: bool = False) -> Any:
    """A Python literal as a JSON value. Sets, bytes and keys that are not text are refused.

    A tuple of a result becomes a list, which equals it. One of an argument is refused: a program may use it as a key.
    """
    if isinstance(value, list) or (isinstance(value, tuple) and not is_argument):
        return [plain(each, is_argument=is_argument) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(each, is_argument=is_argument) for key, each in value.items()}
    if isinstance(value, int) and abs(value) >= _TOO_LONG:
        raise Rejected(Reason.TOO_LARGE, f"an integer has more than {_MAX_DIGITS} digits")
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
