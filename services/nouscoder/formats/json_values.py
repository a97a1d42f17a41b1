"""JSON text: its value, quickly; its weight and its keys before it is decoded; breaks for an event loop.

orjson decodes and encodes in half of pydantic's time. The value never depends on the library: what orjson refuses and
Python's json module takes (NaN, infinity, deep nesting) is read by pydantic, and so is a text with an integer beyond 64
bits, which orjson would round.

The *weight* of a text counts what takes time and memory: 1 for each comma, list and text, 2 for each object and 8 for
each of its fields. `[1,2,3]` weighs 4. For each unit of weight, decoding and encoding take at most 200 ns each, and the
values at most 48 bytes, beside the characters of texts (measured: lists of numbers, texts, lists and objects, and one
large object). Characters inside texts weigh nothing, so a test with megabytes of input is light. Equal values have the
same weight, also where one has 1.0 and the other 1.

INVARIANT: the garbage collector is off while any thread is inside `without_collections`, and afterwards as it was.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from nouscoder.domain.submission import CallCase, Case, StdinCase

_PIECE_CHARS = 1 << 20
_FIRST_ROUNDED = 2.0**63  # no smaller integer is read as a float
_NEVER_ROUNDED = frozenset({str, int, bool, type(None)})


def json_value(text: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError, which says where the text is wrong."""
    try:
        value = orjson.loads(text)
        return from_json(text) if _may_be_rounded(value) else value
    except (ValueError, RecursionError):
        return from_json(text)


_HALF_OF_PAIR = re.compile(
    rb"(?<!\\)(?P<slashes>\\++)u(?:(?P<high>[dD][89abAB][0-9a-fA-F]{2})(?P<low>\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
    rb"|(?P<alone>[dD][c-fC-F][0-9a-fA-F]{2}))"
)


def with_whole_characters(text: bytes) -> bytes:
    """A JSON text whose halves of surrogate pairs are U+FFFD. JSON allows them; no Unicode text holds them.

    A model's answer that was cut inside an escaped emoji has one. Time and memory are linear.
    """
    return _HALF_OF_PAIR.sub(_whole, text) if b"\\ud" in text or b"\\uD" in text else text


def _whole(found: re.Match[bytes]) -> bytes:
    slashes, high, low, alone = found.group("slashes", "high", "low", "alone")
    if len(slashes) % 2 == 0:  # an escaped backslash, and no escape behind it
        return slashes + b"u" + (high or alone) + (b"\\ufffd" if low else b"")
    return found.group() if low else slashes + b"ufffd"


def json_bytes(value: Any) -> bytes:
    """A value as JSON text. Much quicker than Python's json module, which writes what pydantic refuses."""
    try:
        return to_json(value)
    except ValueError:  # texts that are not Unicode, deep nesting
        return json.dumps(value).encode()


def text_json(text: str) -> str:
    """A text as JSON, written piece by piece, because the interpreter runs nothing else meanwhile."""
    if len(text) <= _PIECE_CHARS:
        return json.dumps(text)
    pieces = (json.dumps(text[at : at + _PIECE_CHARS])[1:-1] for at in range(0, len(text), _PIECE_CHARS))
    return f'"{"".join(pieces)}"'


def case_json(case: Case) -> bytes:
    """A case of tests in the canonical form. Raises what `formats.body.canonical_parts` raises."""
    record: object = case
    if isinstance(case, StdinCase):
        if not case.args:  # as in the digests of earlier versions
            record = {"input": case.input, "output": case.output}
    elif isinstance(case, CallCase):  # orjson writes NaN as null, and no integer beyond 64 bits
        return to_json(case)
    try:
        return orjson.dumps(record)
    except TypeError:
        return to_json(record)  # it raises ValueError for text that is not Unicode


def _may_be_rounded(value: Any) -> bool:
    """Whether a float is so large that it may have been an integer."""
    kind = type(value)
    if kind is float:
        return bool(abs(value) >= _FIRST_ROUNDED)
    if kind is not list and kind is not dict:
        return False
    values = value if kind is list else value.values()
    # Most lists and records hold only texts and integers. Looking at their types takes a fifth of a loop's time.
    return not _NEVER_ROUNDED.issuperset(map(type, values)) and any(map(_may_be_rounded, values))


MAX_WEIGHT = 500_000  # decoding as much in one call holds the interpreter for a tenth of a second
BYTES_PER_WEIGHT = 48
_SHOWN_CHARS = 60
GIVEN_TWICE = "is given twice in one JSON object"
_PIECE_BYTES = 1 << 18  # the interpreter runs nothing else while it looks at a piece


_SLASHES, _QUOTE = b"\\\1", b"\\\2"  # in the place of escapes; JSON has no such control characters


class TooManyValues(Exception):
    """A text weighs more than it may."""

    def __init__(self) -> None:
        super().__init__(f"holds too many values: at most about {MAX_WEIGHT:,} integers, or fewer of other kinds")


class RepeatedKey(ValueError):
    """An object of a text has a key twice. A decoder keeps one of the two values without a word."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key[:_SHOWN_CHARS]!r} {GIVEN_TWICE}")
        self.key = key


class ValueCount:
    """The weight of all JSON texts of one request: its body, and texts inside it that are JSON themselves."""

    def __init__(self, weight: int = 0, most: int = MAX_WEIGHT) -> None:
        self.weight = weight
        self._most = most

    @classmethod
    def unbounded(cls) -> ValueCount:
        """Of a text of this machine's own user."""
        return cls(most=sys.maxsize)

    def add(self, text: bytes | str) -> None:
        """Count a text that is about to be decoded. Raises TooManyValues and RepeatedKey."""
        self.add_weight(json_weight(text, self._most - self.weight))

    def add_weight(self, weight: int) -> None:
        """Count values. Raises TooManyValues."""
        self.weight += weight
        if self.weight > self._most:
            raise TooManyValues


def json_weight(text: bytes | str, enough: int = sys.maxsize) -> int:
    """The weight of a text; of one that weighs more than `enough`, some weight above it.

    Where the text stops being JSON, the weight of the rest may be wrong; no decoder reads it. Raises RepeatedKey when
    an object has a key twice, unless the text weighs more than `enough`.
    """
    data = text if isinstance(text, bytes) else text.encode("utf8", "surrogatepass")
    weight, inside, rest, keys = 0, False, b"", _Keys()
    for begin in range(0, len(data), _PIECE_BYTES):
        piece = rest + data[begin : begin + _PIECE_BYTES]
        rest = b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what it escapes is in the next piece
                piece, rest = piece[:-1], b"\\"
            piece = piece.replace(b"\\\\", _SLASHES).replace(b'\\"', _QUOTE)
        parts = piece.split(b'"')
        outside = parts[inside::2]
        marks = b'"'.join(outside)
        weight += marks.count(b",") + marks.count(b"[") + 2 * marks.count(b"{") + 8 * marks.count(b":")
        weight += (len(parts) - 1 + (not inside)) // 2  # the texts that begin in this piece
        if weight > enough:
            break
        keys.add(marks if outside else None, parts[not inside :: 2], continues=inside)
        inside ^= len(parts) % 2 == 0
    return weight


_TEXT, _KEY = b"\0", b"\1"
_MARKS = bytes.maketrans(b'"', _TEXT)
_NO_MARKS = bytes(set(range(256)) - set(b'{}":'))
_BRACES, _SHOWN_BRACES = bytes.maketrans(b"{}", b"\1\2"), bytes.maketrans(b"\1\2", b"{}")  # inside of keys
_INNERMOST = re.compile(rb"\{[^{}]*+\}")
_ROUNDS = 4  # so many levels of objects are searched at once, and those outside of them one after another
_TOKEN = re.compile(rb'[{}]|"[^"]*+"')


class _Keys:
    """Looks for a key that an object has twice, in a text that comes in pieces.

    Objects with the same keys in the same order, as those of test cases, are looked at once in each piece.
    """

    def __init__(self) -> None:
        self._names: set[bytes] = set()  # of the innermost object that is open
        self._outer: list[set[bytes]] = []
        self._begun: list[bytes] = []  # the parts of the text in which the last piece ended
        self._held: list[bytes] = []  # the text with which the last piece ended: a key if a colon follows

    def add(self, marks: bytes | None, texts: list[bytes], *, continues: bool) -> None:
        """`marks` are what is outside of texts, with a quote for each text between; None inside of a longer text.

        With `continues` the first text began in an earlier piece. Raises RepeatedKey.
        """
        if continues:
            self._begun.append(texts[0])
            if marks is None:
                return
            texts[0] = b"".join(self._begun)
            marks = b'"' + marks
        assert marks is not None
        marks = (b'"' * len(self._held) + marks).translate(_MARKS, _NO_MARKS)
        texts = self._held + texts
        self._begun = texts[marks.count(_TEXT) :]
        self._held = []
        if marks.endswith(_TEXT):
            marks = marks[:-1]
            self._held = [texts[marks.count(_TEXT)]]
        marks = marks.replace(_TEXT + b":", _KEY)
        keys = list(compress(texts, marks.translate(None, b"{}:")))
        if b"\\" in b"".join(keys):
            keys = list(map(_unescaped, keys))
        between = marks.translate(None, _TEXT + b":").split(_KEY)
        objects = [b""] * (len(keys) + len(between))
        objects[::2] = between
        objects[1::2] = b'"'.join(keys).translate(_BRACES).split(b'"') if keys else ()
        self._search(b'"'.join(objects))

    def _search(self, objects: bytes) -> None:
        """`objects` are all braces, and the keys in quotes. Raises RepeatedKey."""
        for _ in range(_ROUNDS):
            if not (found := set(_INNERMOST.findall(objects))):
                break
            for each in found:
                if len(set(keys := each.split(b'"')[1::2])) < len(keys):
                    raise RepeatedKey(_shown(next(key for key in keys if keys.count(key) > 1)))
            objects = _INNERMOST.sub(b"", objects)
        for token in _TOKEN.findall(objects):
            if token == b"{":
                self._outer.append(self._names)
                self._names = set()
            elif token == b"}":
                self._names = self._outer.pop() if self._outer else set()
            elif token in self._names:
                raise RepeatedKey(_shown(token[1:-1]))
            else:
                self._names.add(token)


def _unescaped(key: bytes) -> bytes:
    """A key with no more escapes than it needs, and without a quote; escapes of slashes and quotes are marked in it."""
    text = b'"' + key.replace(_SLASHES, b"\\\\").replace(_QUOTE, b'\\"') + b'"'
    try:
        known = json.dumps(json.loads(with_whole_characters(text)), ensure_ascii=False)
    except ValueError:  # no decoder reads it either
        return key
    return known[1:-1].replace('\\"', "\\u0022").encode("utf8", "surrogatepass")


def _shown(key: bytes) -> str:
    return key.translate(_SHOWN_BRACES).decode("utf8", "replace")


LONG_BYTES = 256 * 1024  # of a text; the interpreter runs nothing else while one call handles it
_BREAK_S = 0.005

_lock = threading.Lock()
_inside = 0
_was_enabled = False


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn the garbage collector off. While a million lists are decoded it would start again and again, which takes
    three times as long as the decoding.
    """
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()


def give_way(num_bytes: int) -> None:
    """Let the event loop have a few turns, in another thread, after a call that handled so many bytes.

    The loop takes the interpreter's lock anew for each turn, and an answer needs several. Without breaks it would wait
    for several long calls.
    """
    if num_bytes > LONG_BYTES and threading.current_thread() is not threading.main_thread():
        time.sleep(_BREAK_S)
