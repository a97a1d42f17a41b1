"""Comparators of the operator: functions of installed packages, which verifier.comparators lists.

A client names one in `comparator.entry_point`. Only what the configuration lists is ever imported, and only when the
service starts. They see the expected outputs, so they run beside the gateway and never in a sandbox. They have
processes of their own, because a regular expression that an output keeps busy would hold the whole gateway.

INVARIANT: nothing that a program prints makes a comparator's fault. One that raises, takes too long or ends its process
is tried with the expected output itself, as a checker that crashes is: only if it fails again, it is at fault, and the
outcome is unknown.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import MappingProxyType

from nouscoder.domain.submission import Comparator, ComparatorKind
from nouscoder.entry_points import load_entry_point
from nouscoder.errors import Unusable

Comparison = Callable[[str, bytes, Comparator], bool]  # (expected output, actual output, the comparator asked for)

threads = ThreadPoolExecutor(2, "comparator")  # each has one process, so as many comparisons are in progress
_KEY = "verifier.comparators"
_LIMIT_S = 10
_START_S = 120  # a new process imports the operator's package
_SPAWN = multiprocessing.get_context("spawn")
_loaded: dict[str, Comparison] = {}
_of_thread = threading.local()


class ComparatorFailed(Exception):
    """A comparator of the operator cannot compare. The message names it."""


class _Fault(Exception):
    """A comparison without an answer."""


class _Ended(_Fault):
    """The process has ended. It was late, or something else has ended it."""

    def __init__(self, message: str, *, is_late: bool) -> None:
        super().__init__(message)
        self.is_late = is_late


class _Comparer:
    """A process that compares for one thread."""

    def __init__(self) -> None:
        self._pipe, there = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def compare(self, expected: str, actual: bytes, comparator: Comparator) -> bool:
        """The answer. Raises _Fault, and _Ended, which leaves the process dead."""
        try:
            self._pipe.send((_LIMIT_S, expected, actual, comparator))
            if not self._pipe.poll(_LIMIT_S + _START_S):
                raise EOFError
            right, fault = self._pipe.recv()
        except (EOFError, OSError):
            self._process.kill()
            self._process.join()
            if self._process.exitcode == -signal.SIGALRM:
                raise _Ended(f"it takes more than {_LIMIT_S} s", is_late=True) from None
            raise _Ended("it ends its process", is_late=False) from None
        if fault:
            raise _Fault(fault)
        return bool(right)


def _serve(pipe: Connection) -> None:
    """Compare until the service ends. A comparison that takes too long ends this process, whatever it does."""
    while True:
        try:
            limit_s, expected, actual, comparator = pipe.recv()
        except EOFError:
            return
        if comparator.entry_point not in _loaded:
            load_comparators([comparator.entry_point])
        signal.alarm(limit_s)
        try:
            answer = bool(_loaded[comparator.entry_point](expected, actual, comparator)), ""
        except Exception as error:  # whatever a function of somebody else raises
            answer = False, f"{type(error).__name__}: {error}"
        signal.alarm(0)
        pipe.send(answer)


def load_comparators(entry_points: Iterable[str]) -> None:
    """Import the functions that the configuration lists. Raises Unusable."""
    for name in entry_points:
        found = load_entry_point(_KEY, name)
        if not callable(found):
            raise Unusable(f"{_KEY} {name!r} cannot be called")
        _loaded[name] = found


def published_comparators() -> list[str]:
    """The comparators of every service."""
    return [kind.value for kind in ComparatorKind if kind is not ComparatorKind.ENTRY_POINT]


def loaded_comparators() -> Mapping[str, Comparison]:
    """What clients can name."""
    return MappingProxyType(_loaded)


def same_for_user(expected: str, actual: bytes, comparator: Comparator) -> bool:
    """Whether the comparator's function takes the output for right. Call it in `threads`. Raises ComparatorFailed."""
    try:
        return _compared(expected, actual, comparator)
    except _Fault:
        try:
            _compared(expected, expected.encode("utf8", "surrogatepass"), comparator)
        except _Fault as fault:
            name = comparator.entry_point
            raise ComparatorFailed(f"comparator {name} fails with its own answer: {fault}") from fault
        return False


def _compared(expected: str, actual: bytes, comparator: Comparator) -> bool:
    """The answer. A process that was not late may have been killed for another reason, so a second one tries again."""
    for is_last in (False, True):
        if not hasattr(_of_thread, "comparer"):
            _of_thread.comparer = _Comparer()
        comparer: _Comparer = _of_thread.comparer
        try:
            return comparer.compare(expected, actual, comparator)
        except _Ended as ended:
            del _of_thread.comparer
            if ended.is_late or is_last:
                raise
    raise AssertionError("the last attempt returns or raises")
