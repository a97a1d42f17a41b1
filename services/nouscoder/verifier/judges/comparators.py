"""Comparison of a program's output with the expected output. Pure. Runs in the gateway only.

The actual output is hostile. The work is bounded by the size of the expected output plus one pass over the actual
bytes. Nested values are compared without recursion. Nothing in the output is executed.

INVARIANT: text is compared token by token or line by line, so a comparison needs at most 5 MiB beside copies of its two
texts, and other threads can run meanwhile. A result with more values than the expected one is not decoded.

Text is compared as bytes; white space means ASCII white space:
- exact: byte for byte;
- lines: white space at the end of lines and empty lines at the end are ignored;
- unordered_lines: as lines, but in any order, each as often as expected;
- tokens: tokens separated by white space. Two numbers may differ by the absolute or the relative tolerance, whichever
  is wider. Two integers must be equal, so that a tolerance cannot accept a wrong count;
- kattis: tokens, as Kattis's default validator compares them. With a tolerance, a number must be within the absolute
  tolerance or within the relative tolerance times the expected number. This holds for integers too;
- lcb: lines, as LiveCodeBench's grader compares them: white space around a line is ignored (Unicode's too), and so are
  empty lines around the output. A line that differs must consist of numbers alone, equal or within the absolute
  tolerance. Source: LiveCodeBench, lcb_runner/evaluation/testing_util.py, whose tolerance is 0; NousCoder-14B's grader
  (NousResearch/atropos, environments/code_execution_server/lcb_modal_endpoint.py) has 1e-4.

With `ignore_case`, upper and lower case ASCII letters are equal.

A difference of exactly the tolerance is allowed. It is computed with decimal digits where floats cannot decide:
0.999999 differs from 1.0 by 1e-6, although the difference of the floats is larger, and 2e400 differs from 1e400.

Values (call results) are compared like Python's == after JSON, where a tuple is a list, with three exceptions:
- a bool equals only a bool (`1 == True` is a known false positive of public graders);
- where a float is expected, an integer or a float may differ by rounding (1e-9 relative, 1e-12 absolute), so 0.1 + 0.2
  is 0.3. Where an integer is expected, only that number is equal, as an integer or a float (3.0 is 3);
- NaN equals NaN, because otherwise no program could pass such a test.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, DecimalException
from hashlib import blake2b
from itertools import zip_longest

from nouscoder.domain.submission import Comparator, ComparatorKind, JsonValue
from nouscoder.formats.json_values import give_way, json_weight, without_collections

ROUNDING_RELATIVE = 1e-9
ROUNDING_ABSOLUTE = 1e-12
MAX_NUMBER_BYTES = 400
MAX_INT_DIGITS = 4300
MIN_BOUND_BYTES = 4096
MAX_EXPANDED_BYTES = 1 << 22
_FLOAT_ERROR = 1e-15  # of a difference of two floats, relative to the larger one
_SMALLEST = 1e-300
SMALL_BYTES = 1 << 15  # of results and outputs; a comparison of larger ones takes milliseconds

_NUMBER = re.compile(rb"[+-]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]+)?")  # an integer has none of the groups
_WORD = re.compile(r"\S+")
_DIFFERENCES = Context(prec=28)  # of those graders: Python's own
_PIECE_BYTES = 1 << 16  # the interpreter runs nothing else while it splits a piece
_MANY_LINES = 10_000
_HASH_BYTES = 16
_HASH_KEY = secrets.token_bytes(16)


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
    if comparator.kind is ComparatorKind.LCB:
        texts = wanted.decode("utf8", "surrogatepass"), actual.decode("utf8", "surrogateescape")
        return same_as_lcb_prints(*texts, comparator.absolute)
    wanted, actual = wanted.rstrip(), actual.rstrip()
    if wanted == actual:
        return True
    if comparator.kind is ComparatorKind.LINES:
        return all(w == a for w, a in zip_longest(_lines(wanted), _lines(actual)))
    if comparator.kind is ComparatorKind.UNORDERED_LINES:
        return wanted.count(b"\n") == actual.count(b"\n") and _same_unordered_lines(wanted, actual)
    return _same_tokens(wanted, actual, comparator)


def _lines(text: bytes) -> Iterator[bytes]:
    begin = 0
    while (end := text.find(b"\n", begin)) >= 0:
        yield text[begin:end].rstrip()
        begin = end + 1
    yield text[begin:].rstrip()


def _same_unordered_lines(wanted: bytes, actual: bytes) -> bool:
    """For two texts with equally many lines. Counting many different lines would take a hundred bytes for each."""
    if wanted.count(b"\n") < _MANY_LINES:
        return Counter(_lines(wanted)) == Counter(_lines(actual))
    return _multiset_hash(wanted) == _multiset_hash(actual)


def _multiset_hash(text: bytes) -> int:
    """A hash of the lines that is the same in any order, and takes no memory for each line.

    Source: MSet-Add-Hash (Clarke et al. 2003, "Incremental multiset hash functions"). With a secret key, two different
    outputs of at most 2^26 lines have the same hash with a probability of at most 2^-102.
    """
    digests = (blake2b(line, digest_size=_HASH_BYTES, key=_HASH_KEY).digest() for line in _lines(text))
    return sum(int.from_bytes(digest, "little") for digest in digests) % (1 << 8 * _HASH_BYTES)


def same_as_lcb_prints(expected: str, printed: str, tolerance: float = 0.0) -> bool:
    """Whether the number of lines is equal and each stripped line is equal, as text or as a list of decimals.

    Two decimals may differ by `tolerance`.
    """
    most = Decimal(repr(tolerance))
    pairs = zip_longest(_stripped_lines(expected.strip()), _stripped_lines(printed.strip()))
    return all(w == a or (w is not None and a is not None and _same_decimals(w, a, most)) for w, a in pairs)


def _stripped_lines(text: str) -> Iterator[str]:
    begin = 0
    while (end := text.find("\n", begin)) >= 0:
        yield text[begin:end].strip()
        begin = end + 1
    yield text[begin:].strip()


def _same_decimals(wanted: str, actual: str, most: Decimal) -> bool:
    for w, a in zip_longest(_WORD.finditer(wanted), _WORD.finditer(actual)):
        if w is None or a is None:
            return False
        try:
            one, other = Decimal(w.group()), Decimal(a.group())
            if one != other and not (most and _DIFFERENCES.abs(_DIFFERENCES.subtract(one, other)) <= most):
                return False
        except (DecimalException, ValueError):
            return False
    return True


def _same_tokens(wanted: bytes, actual: bytes, comparator: Comparator) -> bool:
    absolute, relative = comparator.absolute, comparator.relative
    is_kattis = comparator.kind is ComparatorKind.KATTIS
    is_tolerant = max(absolute, relative) > 0
    for w, a in zip_longest(_tokens(wanted), _tokens(actual)):
        if w == a:
            continue
        if not is_tolerant or w is None or a is None or not _close_tokens(w, a, absolute, relative, is_kattis):
            return False
    return True


def _tokens(text: bytes) -> Iterator[bytes]:
    begun: list[bytes] = []  # the parts so far of a token that may go on in the next piece
    for at in range(0, len(text), _PIECE_BYTES):
        piece = text[at : at + _PIECE_BYTES]
        tokens = piece.split()
        if begun and tokens and not piece[:1].isspace():
            begun.append(tokens.pop(0))
        if begun and (tokens or piece[:1].isspace() or piece[-1:].isspace()):
            yield b"".join(begun)
            begun.clear()
        if tokens and not piece[-1:].isspace():
            begun.append(tokens.pop())
        yield from tokens
    if begun:
        yield b"".join(begun)


def _close_tokens(wanted: bytes, actual: bytes, absolute: float, relative: float, is_kattis: bool) -> bool:
    """Source of the rule for kattis: its default validator (problemtools, default_validator.cc)."""
    parts, actual_parts = _number(wanted), _number(actual)
    if parts is None or actual_parts is None:
        return False
    if not is_kattis and parts.lastindex is None and actual_parts.lastindex is None:
        return int(wanted) == int(actual)
    return _within(wanted.decode(), actual.decode(), absolute, relative, of_larger=not is_kattis)


def _number(token: bytes) -> re.Match[bytes] | None:
    return _NUMBER.fullmatch(token) if len(token) <= MAX_NUMBER_BYTES else None


def _within(wanted: str, actual: str, absolute: float, relative: float, *, of_larger: bool = True) -> bool:
    """Whether two numbers differ by at most a tolerance. `relative` is of the larger number, or of the wanted one.

    Floats decide, unless the difference is so near to the tolerance that their error matters.
    """
    one, other = float(wanted), float(actual)
    size = max(abs(one), abs(other))
    most = max(absolute, relative * (size if of_larger else abs(one)))
    error = _FLOAT_ERROR * (size + most) + _SMALLEST
    difference = abs(one - other)
    if abs(difference - most) > error and math.isfinite(most):  # false for NaN
        return difference <= most
    return _exactly_within(wanted, actual, (absolute, relative), of_larger)


def _exactly_within(wanted: str, actual: str, tolerances: tuple[float, float], of_larger: bool) -> bool:
    numbers = _DECIMALS
    one, other = numbers.create_decimal(wanted), numbers.create_decimal(actual)
    absolute, relative = (Decimal(repr(tolerance)) for tolerance in tolerances)
    size = numbers.max(numbers.abs(one), numbers.abs(other)) if of_larger else numbers.abs(one)
    most = numbers.max(absolute, numbers.multiply(relative, size))
    difference = numbers.abs(numbers.subtract(one, other))
    return difference.is_finite() and numbers.compare(difference, most) <= 0


# More digits than the two numbers have; infinity for an exponent that does not exist. It raises nothing.
_DECIMALS = Context(prec=4 * MAX_NUMBER_BYTES, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


def result_bound(expected_json: str) -> int:
    """An upper bound [bytes] on the encoding of any equal value.

    Escapes and digits expand one character to at most 64 bytes; for example, 1e+308 equals an integer of 309 digits.
    A long value does not expand as a whole, and parsing more than a few MiB would stall the service.
    """
    return min(MIN_BOUND_BYTES + 64 * len(expected_json), MAX_EXPANDED_BYTES + 8 * len(expected_json))


def parse_result(encoded: bytes, expected_json: str) -> JsonValue | HugeInt:
    """The result of a call as a value. Raises UnreadableResult unless it is one JSON value that may be equal."""
    if len(encoded) > result_bound(expected_json):
        raise UnreadableResult(f"the result has {len(encoded)} bytes, far more than the expected value")
    if len(encoded) <= SMALL_BYTES:
        return _decoded(encoded)
    if has_more_values(encoded, expected_json):
        raise UnreadableResult("the result has more values than the expected value")
    give_way(len(encoded))
    with without_collections():
        return _decoded(encoded)


def _decoded(encoded: bytes) -> JsonValue | HugeInt:
    try:
        value: JsonValue = json.loads(encoded, parse_int=_parse_int, parse_float=_parse_float)
    except (ValueError, RecursionError) as error:
        raise UnreadableResult(f"the result is not a JSON value: {type(error).__name__}") from None
    return value


def _parse_float(text: str) -> float:
    """As the decoder does. It calls this, so that other threads can run between two of a million numbers."""
    return float(text)


def has_more_values(encoded: bytes, expected_json: str, more: int = 0) -> bool:
    """Whether a JSON text has more values than an equal one can have, and `more` beside them. It is not decoded."""
    most = json_weight(expected_json) + more
    return json_weight(encoded, most) > most


def _parse_int(text: str) -> int | HugeInt:
    return int(text) if len(text.lstrip("-")) <= MAX_INT_DIGITS else HugeInt(text)


def right_values(expected: JsonValue, *, wrapped: bool) -> list[JsonValue]:
    """The values that are right: the expected one and, if it is `wrapped` in a list of one, the value in the list."""
    return [expected, *expected] if wrapped and isinstance(expected, list) and len(expected) == 1 else [expected]


def same_value(expected: object, actual: object, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """Whether a value equals the expected one by the rules of this module. Expected floats have the wider tolerance.

    The rounding tolerance is the minimum.
    """
    absolute, relative = max(absolute, ROUNDING_ABSOLUTE), max(relative, ROUNDING_RELATIVE)
    pending: list[Iterator[tuple[object, object]]] = [iter([(expected, actual)])]
    while pending:
        pair = next(pending[-1], None)
        if pair is None:
            pending.pop()
            continue
        wanted, got = pair
        if isinstance(wanted, list | tuple):
            if not isinstance(got, list | tuple) or len(wanted) != len(got):
                return False
            pending.append(zip(wanted, got, strict=True))
        elif isinstance(wanted, dict):
            if not isinstance(got, dict) or wanted.keys() != got.keys():
                return False
            pending.append(zip(wanted.values(), map(got.__getitem__, wanted), strict=True))
        elif not _same_scalar(wanted, got, absolute, relative):
            return False
    return True


def _same_scalar(wanted: object, actual: object, absolute: float, relative: float) -> bool:
    if isinstance(wanted, bool) or isinstance(actual, bool):
        return wanted is actual
    if isinstance(wanted, float):
        return _same_float(wanted, actual, absolute, relative)
    if isinstance(wanted, int):
        return isinstance(actual, int | float) and wanted == actual
    return type(wanted) is type(actual) and wanted == actual


def _same_float(wanted: float, actual: object, absolute: float, relative: float) -> bool:
    if not isinstance(actual, int | float):
        return False
    if wanted == actual:
        return True
    try:
        other = float(actual)
    except OverflowError:  # the integer exceeds the largest float
        return False
    if not (math.isfinite(wanted) and math.isfinite(other)):
        return math.isnan(wanted) and math.isnan(other)
    return _within(repr(wanted), repr(other), absolute, relative)
