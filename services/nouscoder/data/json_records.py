"""Reads the records of a JSON file one at a time: JSON lines, or one array, plain or compressed (.gz, .zst).

INVARIANT: at most one record and one piece of the file are in memory.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from pydantic import ValidationError

from nouscoder.errors import Unusable
from nouscoder.formats.body import Body, first_fault
from nouscoder.formats.json_values import json_value

# Files that may be compressed are read by their first bytes, and written by their name.

STDIN = Path("-")
_BUFFER_BYTES = 1024**2


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, or of standard input for `-`, decompressed. Raises OSError, also for a broken file."""
    import zstandard

    try:
        with ExitStack() as stack:
            file = sys.stdin.buffer if path == STDIN else stack.enter_context(path.open("rb", _BUFFER_BYTES))
            head = cast("io.BufferedReader", file).peek(4)[:4]
            if head[:2] == b"\x1f\x8b":
                file = cast("IO[bytes]", stack.enter_context(gzip.open(file)))
            elif head == b"\x28\xb5\x2f\xfd":
                file = stack.enter_context(zstandard.open(file, "rb"))
            else:
                yield cast("io.BufferedReader", file)
                return
            yield io.BufferedReader(cast("io.RawIOBase", file), _BUFFER_BYTES)
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise OSError(f"it is not a complete compressed file: {error}") from error


@contextmanager
def created(path: Path, name: str) -> Iterator[IO[bytes]]:
    """A new file, compressed as the ending of `name` says. Raises OSError."""
    if name.endswith(".gz"):
        with gzip.open(path, "wb") as packed:
            yield cast("IO[bytes]", packed)
    elif name.endswith(".zst"):
        import zstandard

        with zstandard.open(path, "wb") as packed_frames:
            yield packed_frames
    else:
        with path.open("wb") as plain:
            yield plain


AnyBody = TypeVar("AnyBody", bound=Body)

_PIECE = 1024**2
_NEXT_ITEM = re.compile(r"[ \t\r\n,]*")


class UnreadableFile(Unusable):
    """A file cannot be read as a whole. The message names it."""


class BadRecord(Unusable):
    """A record of a file does not have the expected form. The message names the file, the record and the field."""


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """One value of a file. `number` is its line, or its place in the array, counted from 1. `fault`: it is not JSON."""

    number: int
    value: Any
    fault: str = ""


def read_records(path: Path) -> Iterator[JsonRecord]:
    """The records of a file; `-` is standard input. A line that is not JSON is a record with a fault.

    A file whose first character is [ holds one array. Raises UnreadableFile, also for a fault inside an array.
    """
    try:
        with opened(path) as file:
            head = file.peek(_PIECE)
            if head.lstrip()[:1] == b"[" and not _is_line_of_arrays(head):
                yield from _array(path, io.TextIOWrapper(file, "utf8"))
            else:
                yield from _lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def checked_records(path: Path, form: type[AnyBody]) -> Iterator[AnyBody]:
    """The records of a file, each of this form. Raises BadRecord for the first bad record, and UnreadableFile."""
    for record in read_records(path):
        if record.fault:
            raise BadRecord(f"{path}, record {record.number}: {record.fault}")
        try:
            yield form.model_validate(record.value)
        except ValidationError as error:
            field, fault = first_fault(error)
            what = fault if field == "body" else f"{field}: {fault}"
            raise BadRecord(f"{path}, record {record.number}: {what}") from None


def _is_line_of_arrays(head: bytes) -> bool:
    """Whether the first line is a whole array and another line follows: JSON lines, not one array."""
    first, newline, rest = head.partition(b"\n")
    if not newline or not rest.strip():
        return False
    try:
        json_value(first)
    except ValueError:
        return False
    return True


def _lines(file: IO[bytes]) -> Iterator[JsonRecord]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield JsonRecord(number, json_value(line))
        except ValueError as error:
            yield JsonRecord(number, None, f"not JSON: {error}")


def _array(path: Path, file: IO[str]) -> Iterator[JsonRecord]:
    """The items of an array. A piece is read when the text so far does not end an item."""
    decoder = json.JSONDecoder()
    text, at, number, piece = file.read(_PIECE).lstrip(), 1, 0, _PIECE
    while True:
        at = _NEXT_ITEM.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text too
        if text.startswith("]", at):
            return
        try:
            value, end = decoder.raw_decode(text, at)
            if end == len(text):  # a number may go on in the next piece
                raise ValueError("the text ends here")
        except (ValueError, RecursionError) as error:
            more = file.read(piece)
            if not more:
                raise UnreadableFile(f"{path}, entry {number + 1}: not JSON: {error}") from None
            text, at = text[at:] + more, 0
            piece *= 2  # so that a long item is not scanned for each piece
            continue
        number, piece, at = number + 1, _PIECE, end
        yield JsonRecord(number, value)
