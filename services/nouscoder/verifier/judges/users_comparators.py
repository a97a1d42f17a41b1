"""Comparators of the operator: functions of installed packages, which verifier.comparators lists.

A client names one in `comparator.entry_point`. Only what the configuration lists is ever imported, and only when the
service starts. They run in the gateway, where the expected outputs are, never in a sandbox.

INVARIANT: nothing that a program prints makes a comparator's fault. A comparator that raises is tried with the expected
output itself, as a checker that crashes is: only if it raises again, it is at fault, and the outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from nouscoder.domain.submission import Comparator, ComparatorKind
from nouscoder.entry_points import load_entry_point
from nouscoder.errors import Unusable

Comparison = Callable[[str, bytes, Comparator], bool]  # (expected output, actual output, the comparator asked for)

_KEY = "verifier.comparators"
_loaded: dict[str, Comparison] = {}


class ComparatorFailed(Exception):
    """A comparator of the operator cannot compare. The message names it."""


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
    """Whether the comparator's function takes the output for right. Raises ComparatorFailed."""
    compare = _loaded[comparator.entry_point]
    try:
        return bool(compare(expected, actual, comparator))
    except Exception:  # whatever a function of somebody else raises
        try:
            compare(expected, expected.encode("utf8", "surrogatepass"), comparator)
        except Exception as error:
            raise ComparatorFailed(f"comparator {comparator.entry_point} fails with its own answer: {error}") from error
        return False
