"""Requests as public data sets and trainers write them, rewritten in this project's form. Pure.

- `tests` with `inputs`, `outputs` and perhaps `fn_name` (APPS, TACO, verl), or with `input` and `output` (Atropos), or
  this record as JSON text. Without `fn_name` (or with "none") each pair is one run of the program; an input or output
  may be a list of lines. With it each pair is one call: an input is the list of arguments, or a text with one JSON
  value in each line (LiveCodeBench), and then its output is JSON too. Otherwise the graders of these sets
  accept a result in a list of one with and without the list (`wrapped`). With `assert_case` (verl) and empty inputs and
  outputs each assert is one run of the program.
- `tests` as a list of `input` and `output`, perhaps with `testtype` or `type` (LiveCodeBench, SYNTHETIC-1, DeepCoder):
  each is one run of the program. Such a list does not say how a function is called, so it is refused for functions.
- `tests` of type "pytest": `file`, a file of tests for pytest, and perhaps `module`, the name by which it imports the
  program ("solution"), and `cases`, the names of its test functions (all that it has). They are found without parsing
  the file, in time linear in its length: Python's parser can take seconds for 200,000 characters of a client. Comments
  and texts are skipped; a function that a file defines only under a condition is not found.
- A field that such tests do not have is refused: what it asks for would not be done.
- null for a field that has no null: its default. Rows of Arrow tables have every field, also those of other tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from itertools import islice
from typing import Any

from nouscoder.domain.submission import CallCase, Comparator, Limits, StdinCase, Submission
from nouscoder.formats.json_values import RepeatedKey, ValueCount

_MAX_CHARS = 200_000  # of asserts, as in verifier/grading/validation.py
_WORD = re.compile(
    r"""
    \#[^\n]*
    | \"\"\" (?: [^\\"] | \\. | "(?!"") )* (?: \"\"\" | \Z )?   # a text without an end takes the rest
    | \'\'\' (?: [^\\'] | \\. | '(?!'') )* (?: \'\'\' | \Z )?
    | " (?: [^\\"\n] | \\. )* "?
    | ' (?: [^\\'\n] | \\. )* '?
    | ^ class [ \t]+ (?P<class> [A-Za-z_]\w* ) [ \t]* (?P<bases> \( [^)\n]{0,200} )?
    | ^ (?P<indent> [ \t]* ) (?: async [ \t]+ )? def [ \t]+ (?P<test> test\w* ) [ \t]* \(
    | ^ (?P<other> [^\s\#"')\]}] )
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL | re.ASCII,
)


def test_names(text: str) -> list[str]:
    """The names of the test functions, in their order: `test_f`, and `TestF::test_one` for a method of a class.

    None for a text that is too long to be graded.
    """
    if len(text) > _MAX_CHARS:
        return []
    found: dict[str, None] = {}
    owner, column = "", ""
    for match in _WORD.finditer(text):
        if match["class"]:
            is_tests = match["class"].startswith("Test") or "TestCase" in (match["bases"] or "")
            owner, column = match["class"] if is_tests else "", ""
        elif match["test"] and not match["indent"]:
            owner = ""
            found[match["test"]] = None
        elif match["test"] and owner and match["indent"] == (column or match["indent"]):
            column = match["indent"]
            found[f"{owner}::{match['test']}"] = None
        elif match["other"]:
            owner = ""
    return list(found)


class NotTests(Exception):
    """There are no tests that can be read. `field` names the part at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


_NO_FUNCTION = (None, "", "none")
_OF_PROGRAMS = (None, "stdin", "stdin_stdout")
_OF_REQUESTS = {item.name for item in fields(Submission)} | {"reveal"}
_OF_LIMITS = {item.name for item in fields(Limits)}
_OF_COMPARATORS = {item.name for item in fields(Comparator)} | {"type"}
_PAIRS = {"inputs", "outputs", "input", "output", "fn_name", "assert_case"}
_OF_LISTED = {"input", "output", "testtype", "type", "fn_name", "metadata"}
_OF_PYTEST = {"file", "module", "cases"}
_OF_JUDGES = {"type", "digest", "entry_point", "setup", "wrapped", "checker", "interactor", "unbuffered"}
_OF_TESTS = _OF_JUDGES | _PAIRS | _OF_PYTEST
NOT_MET = "is unknown here, and it seems to say how the answer is graded: leave it out or mend its name"
_MOST = 100  # that are looked at: fields, and characters of each
_ASKING = (
    *("fn_name", "func_name", "function_name", "entry_point", "time_limit", "timeout", "memory_limit", "comparator"),
    *("checker", "interactor", "tolerance", "special_judge", "assert_case"),
)
_OF_CASES = {item.name for kind in (StdinCase, CallCase) for item in fields(kind)}


def rewritten(record: Any, values: ValueCount) -> dict[str, Any] | None:
    """The request in this project's form; None when it has none of these shapes. The result is not validated.

    `values` counts what is decoded. Raises TooManyValues, and NotTests for a fault of a public shape.
    """
    if not isinstance(record, dict):
        return None
    found = _without_nulls(record, _OF_REQUESTS)
    for name, known in (("limits", _OF_LIMITS), ("comparator", _OF_COMPARATORS)):
        if isinstance(found.get(name), dict):
            found[name] = _without_nulls(found[name], known)
    if "tests" in found:
        found["tests"] = _tests(found["tests"], values)
    return None if found == record else found


def _tests(tests: Any, values: ValueCount) -> Any:
    if isinstance(tests, str):
        tests = _value(tests, values)
    if isinstance(tests, list):
        tests = _of_list(tests)
    if not isinstance(tests, dict):
        return tests
    tests = _without_nulls(tests, _OF_TESTS)
    if tests.get("type") == "pytest":
        file, others = tests.get("file"), {name: value for name, value in tests.items() if name != "file"}
        names = tests.get("cases") or (test_names(file) if isinstance(file, str) else [])
        return {"module": "solution", **others, "type": "assert", "setup": file, "cases": names}
    inputs, outputs = tests.get("inputs", tests.get("input")), tests.get("outputs", tests.get("output"))
    if "type" not in tests and isinstance(inputs, list) and isinstance(outputs, list):
        plural = "s" if "inputs" in tests else ""
        _closed(tests, {f"input{plural}", f"output{plural}", "fn_name", "assert_case"}, "tests")
        if len(inputs) != len(outputs):
            lengths = f"{len(inputs)} inputs and {len(outputs)} outputs"
            raise NotTests("tests.inputs", f"there are {lengths}: each input needs its output")
        name = tests.get("fn_name")
        asserts = tests.get("assert_case")
        if any(asserts) if isinstance(asserts, list) else asserts:
            # verl appends an assert to the program of each case, which then has the case's input and output too.
            is_one_each = isinstance(asserts, list) and all(asserts) and len(inputs) in (0, len(asserts))
            if any([name not in _NO_FUNCTION, *inputs, *outputs]) or not is_one_each:
                raise NotTests(
                    "tests.assert_case", "give one assert for each case, with empty inputs and outputs and no fn_name"
                )
            return {"type": "assert", "cases": asserts}
        return _runs(inputs, outputs) if name in _NO_FUNCTION else _calls(str(name), inputs, outputs, values)
    if isinstance(tests.get("cases"), list):
        known = _OF_CASES - {"expected"} if tests.get("type") == "call" else _OF_CASES
        tests["cases"] = [_without_nulls(case, known) if isinstance(case, dict) else case for case in tests["cases"]]
    return tests


def _of_list(cases: list[Any]) -> dict[str, Any]:
    """Two lists, from a list of cases. Raises NotTests."""
    if not cases or not all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases):
        raise NotTests("tests", 'a list must hold {"input": ..., "output": ...}, or give an object with type and cases')
    for number, case in enumerate(cases):
        _closed(case, _OF_LISTED, f"tests[{number}]")
        metadata = case.get("metadata") or {}
        if isinstance(metadata, dict):
            _closed(metadata, {"func_name"}, f"tests[{number}].metadata")
        functions = (case.get("fn_name"), metadata.get("func_name") if isinstance(metadata, dict) else metadata)
        kinds = [case[name] for name in ("testtype", "type") if name in case]
        if any(kind not in _OF_PROGRAMS for kind in kinds) or any(name not in _NO_FUNCTION for name in functions):
            wanted = '{"inputs": [...], "outputs": [...], "fn_name": ...}'
            raise NotTests("tests", f"for a function give {wanted}, not a list")
    return {name + "s": [case[name] for case in cases] for name in ("input", "output")}


def unmet(record: Mapping[str, Any], known: Collection[str]) -> str:
    """The first field that asks for a grading which is not done, or is a misspelt one of `known`; else empty.

    For records whose other fields are the sender's own.
    """
    for name in islice((one for one, value in record.items() if one not in known and value is not None), _MOST):
        word = name[:_MOST].lower()
        if any(one in word for one in _ASKING) or get_close_matches(word, [*known, *_ASKING], 1, 0.8):
            return name[:_MOST]
    return ""


def _closed(record: dict[str, Any], known: Collection[str], field: str) -> None:
    """Raises NotTests for a field that is not known and has a value."""
    for name, value in record.items():
        if name not in known and value is not None:
            raise NotTests(f"{field}.{name}", f"is not known beside {', '.join(sorted(known))}")


def _runs(inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    pairs = zip(map(_lines, inputs), map(_lines, outputs), strict=True)
    return {"type": "stdin", "cases": [{"input": given, "output": wanted} for given, wanted in pairs]}


def _lines(value: Any) -> Any:
    if isinstance(value, list) and all(type(line) in (str, int, float) for line in value):
        return "\n".join(map(str, value))
    return value


def _calls(name: str, inputs: list[Any], outputs: list[Any], values: ValueCount) -> dict[str, Any]:
    cases, is_text = [], any(isinstance(given, str) for given in inputs)
    for given, wanted in zip(inputs, outputs, strict=True):
        if isinstance(given, str):
            values.add_weight(given.count("\n"))
            lines = [line for line in given.split("\n") if line.strip()]
            given, wanted = [_value(line, values) for line in lines], _value(wanted, values)
        cases.append({"args": given, "expected": wanted})
    return {"type": "call", "entry_point": name, "wrapped": not is_text, "cases": cases}


def _value(text: Any, values: ValueCount) -> Any:
    """The value of JSON text; a value of another type as it is. Raises TooManyValues and NotTests.

    A text that is no JSON is no value: `True` of Python would become the text "True", which no result equals.
    """
    if not isinstance(text, str):
        return text
    try:
        values.add(text)
        return json.loads(text)
    except RepeatedKey as error:
        raise NotTests("tests", str(error)) from None
    except (ValueError, RecursionError):
        raise NotTests("tests", f"a text for tests, arguments or a result must be JSON, not {text[:60]!r}") from None


def _without_nulls(record: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None or name not in known}
