"""What every judge is, and what judges share."""

from __future__ import annotations

from typing import Protocol

from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.sandbox.base import RunResult

CLIP_CHARS = 2000


class Judge(Protocol):
    """The tests of one submission. `prelude` is python that is executed in the program's namespace before it."""

    entry_point: str | None
    prelude: str
    num_tests: int

    def source(self, code: str) -> str:
        """What is run for this code: the code itself, or something around it."""
        ...

    def input_size(self, index: int) -> int:
        """How long the input of test `index` is: the guess of how hard it is."""
        ...

    def stdin(self, index: int) -> bytes:
        """What the process of test `index` is given. Never anything of what is expected."""
        ...

    def answer_outcome(self, index: int, result: RunResult) -> VerdictKind:
        """The outcome of a process that ended by itself with exit code 0."""
        ...

    def shown(self, index: int, result: RunResult) -> tuple[str, str, str]:
        """(input, expected, output) of test `index` as text for people."""
        ...


def readable(data: bytes) -> str:
    """The beginning of hostile bytes as text."""
    return data[: 4 * CLIP_CHARS].decode("utf8", "replace")


def encoded(text: str) -> bytes:
    """Text as a process gets it; lone surrogates make bytes that are no UTF-8."""
    return text.encode("utf8", "surrogatepass")
