"""Tests of any size in a file that a client has sent: each case is decoded and validated when it is read.

The file holds the JSON form of tests (body.py) or a public form of it (public_shapes.py), in any order of the fields.

INVARIANT: one case at a time is decoded. What a file takes in memory beside it is its fields but the cases, of at most
MAX_HEAD_BYTES together, and two numbers for each case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from mmap import mmap
from typing import Any, cast, overload

from pydantic import ValidationError
from pydantic_core import to_json

from nouscoder.domain.submission import Case, Tests
from nouscoder.formats.body import first_fault, tests_from_json
from nouscoder.formats.json_values import (
    GIVEN_TWICE,
    MAX_WEIGHT,
    RepeatedKey,
    TooManyValues,
    ValueCount,
    json_value,
    json_weight,
)
from nouscoder.formats.public_shapes import NotTests as NotTests
from nouscoder.formats.public_shapes import rewritten

MAX_HEAD_BYTES = 1024**2
MAX_CASE_BYTES = 64 * 1024**2
_MAX_FIELDS = 100
_LISTS = ("cases", "inputs", "outputs", "input", "output", "assert_case")
_SPACE = re.compile(rb"[ \t\n\r]*+")
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,:\[\]{}\"]++")
_MARK = re.compile(_TEXT.pattern + rb"|[\[\]{}]", re.DOTALL)
_Text = bytes | mmap
_Span = tuple[int, int]


def sent_tests(text: _Text, max_cases: int) -> Tests:
    """The tests of a file. Raises NotTests, also when a case is read."""
    cases = _SentCases(text, max_cases)
    tests: Any = cases.tests_of(0)
    return cast("Tests", replace(tests, cases=cases))


class _SentCases(Sequence[Any]):
    """The cases of a file. Reading one raises NotTests when it is none."""

    def __init__(self, text: _Text, max_cases: int) -> None:
        self._text = text
        fields = dict(fields_of(text))
        names = [name for name in _LISTS if name in fields and text[fields[name][0]] == ord("[")]
        if names not in (["cases"], ["inputs", "outputs"], ["input", "output"]):
            raise NotTests("tests.cases", "give one list of tests, or the two lists `inputs` and `outputs`")
        self._names = names
        self._lists = [_items(text, fields[name], f"tests.{name}", max_cases) for name in names]
        if len({len(spans) for spans in self._lists}) > 1:
            raise NotTests("tests.inputs", "must have as many items as outputs")
        if not self._lists[0]:
            raise NotTests(f"tests.{names[0]}", "must hold at least one test")
        if sum(fields[name][1] - fields[name][0] for name in fields if name not in names) > MAX_HEAD_BYTES:
            raise NotTests("tests", f"its fields beside the cases may have {MAX_HEAD_BYTES} bytes together")
        self._head = {name: self._value(fields[name], f"tests.{name}") for name in fields if name not in names}
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self._lists[0])

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Case]: ...
    def __getitem__(self, index: int | slice) -> Case | Sequence[Case]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if self._last is None or self._last[0] != at:
            self._last = (at, self.tests_of(at).cases[0])
        case: Case = self._last[1]
        return case

    def tests_of(self, index: int) -> Tests:
        """Tests with one case only."""
        values = ValueCount()
        try:
            for spans in self._lists:
                values.add_weight(self._weight(spans[index]))
            if self._names == ["cases"]:
                begin, end = self._lists[0][index]
                head = to_json(self._head)[:-1] + (b"," if self._head else b"")
                try:
                    return tests_from_json(head + b'"cases":[' + self._text[begin:end] + b"]}")
                except ValidationError:
                    return self._rewritten({"cases": [self._value((begin, end), f"tests.cases[{index}]")]}, values)
            given, wanted = (self._value(spans[index], f"tests.cases[{index}]") for spans in self._lists)
            return self._rewritten(dict(zip(self._names, ([given], [wanted]), strict=True)), values)
        except TooManyValues as error:
            raise NotTests(f"tests.cases[{index}]", str(error)) from None
        except ValidationError as error:  # it is a ValueError too
            field, wrong = first_fault(error, "tests")
            raise NotTests(field.replace("cases[0]", f"cases[{index}]", 1), wrong) from None
        except ValueError as error:  # text that is not Unicode
            raise NotTests(f"tests.cases[{index}]", str(error)) from None

    def _rewritten(self, cases: dict[str, Any], values: ValueCount) -> Tests:
        tests = self._head | cases
        known = rewritten({"tests": tests}, values)
        return tests_from_json(to_json(tests if known is None else known["tests"]))

    def _weight(self, span: _Span) -> int:
        if span[1] - span[0] > MAX_CASE_BYTES:
            raise NotTests("tests", f"a case may have at most {MAX_CASE_BYTES} bytes")
        return json_weight(self._text[slice(*span)], MAX_WEIGHT)

    def _value(self, span: _Span, field: str) -> Any:
        text = self._text[slice(*span)]
        try:
            json_weight(text)
            return json_value(text)
        except RepeatedKey as error:
            raise NotTests(field, str(error)) from None
        except ValueError as error:
            raise NotTests(field, f"not JSON: {error}") from None


def fields_of(text: _Text) -> Iterator[tuple[str, _Span]]:
    """The name and the value of each field of the object that is the whole text."""
    at = _after_space(text, 0)
    if text[at : at + 1] != b"{":
        raise NotTests("body", "not a JSON object")
    last, keys = at + 1, set[str]()
    for number, (begin, end) in enumerate(item_spans(text, at)):
        last = end
        name = _TEXT.match(text, begin)
        colon = -1 if name is None else _after_space(text, name.end())
        if name is None or text[colon : colon + 1] != b":" or number == _MAX_FIELDS:
            raise NotTests("body", f"not JSON: no field of at most {_MAX_FIELDS} at byte {begin}")
        try:
            key = str(json_value(name[0]))
        except ValueError as error:
            raise NotTests("body", f"not JSON: {error}") from None
        value = _after_space(text, colon + 1)
        if value >= end:
            raise NotTests("body", f"not JSON: no value at byte {value}")
        if key in keys:
            raise NotTests(key, GIVEN_TWICE)
        keys.add(key)
        yield key, (value, end)
    if _after_space(text, _after_space(text, last) + 1) != len(text):
        raise NotTests("body", "not JSON: there is more after its end")


def _items(text: _Text, span: _Span, field: str, most: int) -> list[_Span]:
    found: list[_Span] = []
    for item in item_spans(text, span[0]):
        if len(found) == most:
            raise NotTests(field, f"may hold at most {most} tests")
        found.append(item)
    return found


def item_spans(text: _Text, at: int) -> Iterator[_Span]:
    """The items of the list, or the fields of the object, that begins at a byte. Raises NotTests for other text."""
    is_object = text[at : at + 1] == b"{"
    close = b"}" if is_object else b"]"
    at = _after_space(text, at + 1)
    if text[at : at + 1] == close:
        return
    while True:
        begin = at
        if is_object:  # past the name of the field and the colon
            name = _TEXT.match(text, at)
            at = _after_space(text, _after_space(text, at if name is None else name.end()) + 1)
        end = _value_end(text, at)
        yield begin, end
        at = _after_space(text, end)
        mark = text[at : at + 1]
        if mark == close:
            return
        if mark != b",":
            raise NotTests("body", f"not JSON: no comma at byte {at}")
        at = _after_space(text, at + 1)


def _value_end(text: _Text, at: int) -> int:
    """The end of the value that begins at a byte. What is inside it is not checked."""
    first = text[at : at + 1]
    if first not in (b"[", b"{"):
        found = (_TEXT if first == b'"' else _SCALAR).match(text, at)
        if found is None:
            raise NotTests("body", f"not JSON: no value at byte {at}")
        return found.end()
    depth = 0
    for mark in _MARK.finditer(text, at):
        kind = text[mark.start()]
        if kind in b"[{":
            depth += 1
        elif kind in b"]}":
            depth -= 1
            if not depth:
                return mark.end()
    raise NotTests("body", "not JSON: it ends too early")


def _after_space(text: _Text, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
