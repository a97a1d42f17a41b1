"""Comparison of a program's output with the expected output. Pure. Runs in the gateway only.

The actual output is hostile. The work is bounded by the size of the expected output plus one pass over the actual
bytes. Nested values are compared without recursion. Nothing in the output is executed.

Text is compared as bytes; white space means ASCII white space:
- exact: byte for byte;
- lines: white space at the end of lines and empty lines at the end are ignored;
- unordered_lines: as lines, but in any order, each as often as expected;
- tokens: tokens separated by white space. Two numbers may differ by the absolute or the relative tolerance, whichever
  is wider. Two integers must be equal, so that a tolerance cannot accept a wrong count;
- kattis: tokens, as Kattis's default validator compares them. With a tolerance, a number must be within the absolute
  tolerance or within the relative tolerance times the expected number. This holds for integers too.

With `ignore_case`, upper and lower case ASCII letters are equal.

Values (call results) are compared like Python's == after JSON, where a tuple is a list, with three exceptions:
- a bool equals only a bool (`1 == True` is a known false positive of public graders);
- if one of two numbers is a float, they may differ by rounding (1e-9 relative, 1e-12 absolute), so 0.1 + 0.2 is 0.3;
- NaN equals NaN, because otherwise no program could pass such a test.
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
MAX_EXPANDED_BYTES = 1 << 22

_INTEGER = re.compile(rb"[+-]?[0-9]+")
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


class UnreadableResult(ValueError):
    """The result of a call is not a JSON value, so it is wrong. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class HugeInt:
    """An integer with too many digits to convert. Two are equal when their digits are equal."""

    digits: str


def same_text(expected: str, actual: bytes, comparator: Comparator) -> bool:
    """Whether a program's output matches the expected output."""
    wanted = expected.encode("utf8", "surrogatepass")
    if comparator.ignore_case:
        wanted, actual = wanted.lower(), actual.lower()
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
    # The split is bounded, so that output with far more tokens than expected does not become a long list.
    actual_tokens = actual.split(None, len(wanted_tokens))
    if wanted_tokens == actual_tokens:
        return True
    absolute, relative = comparator.absolute, comparator.relative
    if max(absolute, relative) <= 0 or len(wanted_tokens) != len(actual_tokens):
        return False
    close = _kattis_close_tokens if comparator.kind is ComparatorKind.KATTIS else _close_tokens
    pairs = zip(wanted_tokens, actual_tokens, strict=True)
    return all(w == a or close(w, a, absolute, relative) for w, a in pairs)


def _close_tokens(wanted: bytes, actual: bytes, absolute: float, relative: float) -> bool:
    if not (_is_number(wanted) and _is_number(actual)):
        return False
    if _INTEGER.fullmatch(wanted) and _INTEGER.fullmatch(actual):
        return int(wanted) == int(actual)
    return _close(float(wanted), float(actual), absolute, relative)


def _kattis_close_tokens(wanted: bytes, actual: bytes, absolute: float, relative: float) -> bool:
    """Source: the default validator of Kattis (problemtools, default_validator.cc)."""
    if not (_is_number(wanted) and _is_number(actual)):
        return False
    judge, difference = float(wanted), abs(float(wanted) - float(actual))
    return difference <= absolute or difference <= relative * abs(judge)


def _is_number(token: bytes) -> bool:
    return len(token) <= MAX_NUMBER_BYTES and _NUMBER.fullmatch(token) is not None


def _close(wanted: float, actual: float, absolute: float, relative: float) -> bool:
    if not (math.isfinite(wanted) and math.isfinite(actual)):
        return wanted == actual or (math.isnan(wanted) and math.isnan(actual))
    return abs(wanted - actual) <= max(absolute, relative * max(abs(wanted), abs(actual)))


def result_bound(expected_json: str) -> int:
    """An upper bound [bytes] on the encoding of any equal value.

    Escapes and digits expand one character to at most 64 bytes; for example, 1e+308 equals an integer of 309 digits.
    A long value does not expand as a whole, and parsing more than a few MiB would stall the service.
    """
    return min(4096 + 64 * len(expected_json), MAX_EXPANDED_BYTES + 8 * len(expected_json))


def parse_result(encoded: bytes, max_bytes: int) -> JsonValue | HugeInt:
    """The result of a call as a value. Raises UnreadableResult unless it is one JSON value of bounded size."""
    if len(encoded) > max_bytes:
        raise UnreadableResult(f"the result has {len(encoded)} bytes, far more than the expected value")
    try:
        value: JsonValue = json.loads(encoded, parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise UnreadableResult(f"the result is not a JSON value: {type(error).__name__}") from None
    return value


def _parse_int(text: str) -> int | HugeInt:
    return int(text) if len(text.lstrip("-")) <= MAX_INT_DIGITS else HugeInt(text)


def same_value(expected: object, actual: object, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """Whether two JSON values are equal by the rules of this module, with floats within the wider tolerance.

    The rounding tolerance is the minimum.
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
    except OverflowError:  # the integer exceeds the largest float
        return False
