"""Comparing what a program gave with what was expected. Pure, and run in the gateway only.

The actual side is hostile: work is bounded by the size of the expected side plus one pass over the actual bytes,
nesting is walked without recursion, and nothing of it is ever executed.

Text is compared as bytes, white space is ASCII white space:
- exact: byte for byte;
- lines: white space at the end of lines and empty lines at the end are ignored;
- unordered_lines: as lines, but in any order, each as often as expected;
- tokens: white-space separated tokens. With tolerances two numbers may differ by the absolute one or by the relative
  one, whichever is wider; two integers must still be equal, so that a large count cannot be wrong by a few.

Values (call results) are compared as Python's == would after JSON, where a tuple is a list, except that
- a bool equals only a bool (`1 == True` is a known false positive of public graders);
- two numbers of which one is a float may differ by rounding (1e-9 relative, 1e-12 absolute), so that 0.1 + 0.2 is 0.3;
- NaN equals NaN, for nothing else could ever pass such a test.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass

from nouscoder.domain.submission import Comparator, ComparatorKind, JsonValue

ROUNDING_RELATIVE = 1e-9
ROUNDING_ABSOLUTE = 1e-12
MAX_NUMBER_BYTES = 400
MAX_INT_DIGITS = 4300

_INTEGER = re.compile(rb"[+-]?[0-9]+")
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


class UnreadableResult(ValueError):
    """A call's result cannot be read as a JSON value, so it is not the right one. The text says why."""


@dataclass(frozen=True, slots=True)
class HugeInt:
    """An integer too long to be worth converting; equal when its digits are."""

    digits: str


def same_text(expected: str, actual: bytes, comparator: Comparator) -> bool:
    """Whether a program's output is the expected one."""
    wanted = expected.encode("utf8", "surrogatepass")
    if comparator.kind is ComparatorKind.EXACT:
        return wanted == actual
    if comparator.kind is ComparatorKind.LINES:
        return _same_lines(wanted, actual)
    if comparator.kind is ComparatorKind.UNORDERED_LINES:
        return _same_unordered_lines(wanted, actual)
    return _same_tokens(wanted, actual, comparator)


def _same_lines(wanted: bytes, actual: bytes) -> bool:
    wanted_lines = wanted.rstrip().split(b"\n")
    actual_lines = actual.rstrip().split(b"\n", len(wanted_lines))
    if len(wanted_lines) != len(actual_lines):
        return False
    return all(w.rstrip() == a.rstrip() for w, a in zip(wanted_lines, actual_lines, strict=True))


def _same_unordered_lines(wanted: bytes, actual: bytes) -> bool:
    wanted_lines = wanted.rstrip().split(b"\n")
    actual_lines = actual.rstrip().split(b"\n", len(wanted_lines))
    if len(wanted_lines) != len(actual_lines):
        return False
    return Counter(line.rstrip() for line in wanted_lines) == Counter(line.rstrip() for line in actual_lines)


def _same_tokens(wanted: bytes, actual: bytes, comparator: Comparator) -> bool:
    wanted_tokens = wanted.split()
    # A bounded split: output with far more tokens than expected never becomes a list of them.
    actual_tokens = actual.split(None, len(wanted_tokens))
    if wanted_tokens == actual_tokens:
        return True
    absolute, relative = comparator.absolute, comparator.relative
    if max(absolute, relative) <= 0 or len(wanted_tokens) != len(actual_tokens):
        return False
    pairs = zip(wanted_tokens, actual_tokens, strict=True)
    return all(w == a or _close_tokens(w, a, absolute, relative) for w, a in pairs)


def _close_tokens(wanted: bytes, actual: bytes, absolute: float, relative: float) -> bool:
    if len(actual) > MAX_NUMBER_BYTES or len(wanted) > MAX_NUMBER_BYTES:
        return False
    if _INTEGER.fullmatch(wanted) and _INTEGER.fullmatch(actual):
        return int(wanted) == int(actual)
    if not (_NUMBER.fullmatch(wanted) and _NUMBER.fullmatch(actual)):
        return False
    return _close(float(wanted), float(actual), absolute, relative)


def _close(wanted: float, actual: float, absolute: float, relative: float) -> bool:
    if not (math.isfinite(wanted) and math.isfinite(actual)):
        return wanted == actual or (math.isnan(wanted) and math.isnan(actual))
    return abs(wanted - actual) <= max(absolute, relative * max(abs(wanted), abs(actual)))


def result_bound(expected_json: str) -> int:
    """Bytes that no encoding of an equal value reaches.

    Escapes and digits make one character at most 64 bytes: 1e+308 is an integer of 309 digits too.
    """
    return 4096 + 64 * len(expected_json)


def parse_result(encoded: bytes, max_bytes: int) -> JsonValue | HugeInt:
    """A call's result as a value. Raises UnreadableResult for anything but one JSON value of sane size and depth."""
    if len(encoded) > max_bytes:
        raise UnreadableResult(f"the result has {len(encoded)} bytes, far more than what is expected")
    try:
        value: JsonValue = json.loads(encoded, parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise UnreadableResult(f"the result is not a JSON value: {type(error).__name__}") from None
    return value


def _parse_int(text: str) -> int | HugeInt:
    return int(text) if len(text.lstrip("-")) <= MAX_INT_DIGITS else HugeInt(text)


def same_value(expected: object, actual: object, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """Whether two JSON values are the same in the sense of this module's docstring, floats within the wider tolerance.

    Rounding is tolerated at least.
    """
    absolute, relative = max(absolute, ROUNDING_ABSOLUTE), max(relative, ROUNDING_RELATIVE)
    pending = [(expected, actual)]
    while pending:
        wanted, got = pending.pop()
        if isinstance(wanted, list | tuple):
            if not isinstance(got, list | tuple) or len(wanted) != len(got):
                return False
            pending.extend(zip(wanted, got, strict=True))
        elif isinstance(wanted, dict):
            if not isinstance(got, dict) or wanted.keys() != got.keys():
                return False
            pending.extend((wanted[key], got[key]) for key in wanted)
        elif not _same_scalar(wanted, got, absolute, relative):
            return False
    return True


def _same_scalar(wanted: object, actual: object, absolute: float, relative: float) -> bool:
    if isinstance(wanted, bool) or isinstance(actual, bool):
        return wanted is actual
    if isinstance(wanted, float) or isinstance(actual, float):
        return _same_float(wanted, actual, absolute, relative)
    return type(wanted) is type(actual) and wanted == actual


def _same_float(wanted: object, actual: object, absolute: float, relative: float) -> bool:
    if not (isinstance(wanted, int | float) and isinstance(actual, int | float)):
        return False
    if wanted == actual:
        return True
    try:
        return _close(float(wanted), float(actual), absolute, relative)
    except OverflowError:  # an integer beyond every float
        return False
