"""The cases of a file of tests (case_files.py) as the records of the domain, decoded when they are used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, overload

from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    InteractiveTests,
    JudgeProgram,
    JudgeProtocol,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
    Tests,
)
from nouscoder.errors import NousCoderError

Case = TypeVar("Case")

_RECENT_CASES = 8
_RECENT_BYTES = 1 << 20  # of the text of a call that is kept in memory


class CaseFileBroken(NousCoderError):
    """A file of tests is damaged; the message names it."""


class CaseTexts(Protocol):
    """A file of tests, as CaseFile."""

    input_sizes: Sequence[int]

    @property
    def num_cases(self) -> int:
        """How many cases there are."""
        ...

    def case(self, index: int) -> Any:
        """One case as a JSON value. Raises CaseFileBroken."""
        ...

    def case_bytes(self, index: int) -> int:
        """Size of the text of one case."""
        ...


class StoredCases(Sequence[Case], Generic[Case]):
    """The cases of a file, each read when it is used. The last few are kept in memory, except large ones."""

    def __init__(self, file: CaseTexts, decode: Callable[[Any], Case]) -> None:
        self._file = file
        self._decode = decode
        self._recent: OrderedDict[int, Case] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def input_sizes(self) -> Sequence[int]:
        """The size of each case's input, without reading the cases."""
        return self._file.input_sizes

    def text_bytes(self, index: int) -> int:
        """The size of a case as JSON, without reading it."""
        return self._file.case_bytes(index)

    def __len__(self) -> int:
        return self._file.num_cases

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Case]: ...
    def __getitem__(self, index: int | slice) -> Case | Sequence[Case]:
        """Raises CaseFileBroken."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        with self._lock:  # tests of one submission are judged in several threads
            case = self._recent.get(at)
            if case is None:
                case = self._read(at)
        return case

    def _read(self, at: int) -> Case:
        try:
            case = self._decode(self._file.case(at))
        except (TypeError, KeyError) as error:
            raise CaseFileBroken(f"case {at} is not a case: {type(error).__name__}: {error}") from None
        if isinstance(case, CallCase) and self._file.case_bytes(at) > _RECENT_BYTES:
            return case  # the values of several would be a million objects for the garbage collector
        self._recent[at] = case
        if len(self._recent) > _RECENT_CASES:
            self._recent.popitem(last=False)
        return case


def tests_of(head: dict[str, Any], file: CaseTexts) -> Tests:
    """The tests of a file, whose fields before the cases are `head`. Raises ValueError, KeyError and TypeError."""
    match head["type"]:
        case StdinTests.type:
            return StdinTests(StoredCases(file, _stdin))
        case CallTests.type:
            return CallTests(head["entry_point"], StoredCases(file, _call))
        case AssertTests.type:
            return AssertTests(StoredCases(file, str), head["setup"], head.get("module", ""))
        case CheckerTests.type:
            return CheckerTests(StoredCases(file, _stdin), _judge(head["checker"]))
        case InteractiveTests.type:
            checker = _judge(head["checker"]) if "checker" in head else None
            unbuffered = head.get("unbuffered") is True
            return InteractiveTests(StoredCases(file, _stdin), _judge(head["interactor"]), unbuffered, checker)
        case MathTests.type:
            return MathTests(StoredCases(file, lambda record: MathCase(**record)))
        case other:
            raise ValueError(f"{other!r:.40} is no type of tests")


def _judge(record: dict[str, str]) -> JudgeProgram:
    protocol = JudgeProtocol(record.get("protocol", JudgeProtocol.TESTLIB))
    return JudgeProgram(record["code"], record["language"], protocol)


def _stdin(record: Any) -> StdinCase:
    return StdinCase(record["input"], record["output"], tuple(record.get("args", ())))


def _call(record: Any) -> CallCase:
    return CallCase(tuple(record["args"]), record["kwargs"], record["expected"])
