"""The protocol of judges, and the functions that they share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from nouscoder.domain.submission import Case, JsonValue, Tests, TestsReference, input_size
from nouscoder.domain.verdict import VerdictKind
from nouscoder.store.case_files import StoredCases
from nouscoder.verifier.sandbox.base import RunResult

CLIP_CHARS = 2000
_LONG_BYTES = 64 * 1024


class Judge(Protocol):
    """The tests of one submission. `prelude` is Python that runs in the program's namespace before the program."""

    entry_point: str | None
    prelude: str
    num_tests: int

    def source(self, code: str) -> str:
        """The program to run for this code: the code itself, or the code with additions."""
        ...

    def input_size(self, index: int) -> int:
        """The length of the input of test `index`, as an estimate of how hard the test is."""
        ...

    def stdin(self, index: int) -> bytes:
        """The input of the process of test `index`. It contains nothing of the expected output."""
        ...

    def arguments(self, index: int) -> tuple[str, ...]:
        """The arguments of the process of test `index`."""
        ...

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """The outcome of a process that exited with code 0."""
        ...

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """(input, expected, output) of test `index` as readable text."""
        ...


def size_of(cases: Sequence[Case], index: int) -> int:
    """The size of a case's input. Stored cases know it without being read."""
    return cases.input_sizes[index] if isinstance(cases, StoredCases) else input_size(cases[index])


def takes_long(tests: Tests | TestsReference, index: int) -> bool:
    """Whether reading or writing this case would stall the event loop. Cases in memory come from light bodies."""
    if isinstance(tests, TestsReference) or not isinstance(tests.cases, StoredCases):
        return False
    return tests.cases.text_bytes(index) > _LONG_BYTES


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
