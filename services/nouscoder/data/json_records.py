"""Reads JSON records that strangers wrote, one at a time: JSON lines, or one array, plain or compressed (.gz, .zst).

INVARIANT: in memory are at most MAX_LINE_BYTES of a line, one record of a file, and one piece of it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from nouscoder.data import bounded_files
from nouscoder.data.bounded_files import AnyBody, FileRefused, bounded_lines, opened
from nouscoder.errors import Unusable, why_unreadable
from nouscoder.formats.body import first_fault
from nouscoder.formats.json_values import RepeatedKey, json_value, json_weight

_PIECE = 1024**2
_LIGHT_BYTES = 8 * 1024**2  # the values of a text so long take at most 200 MiB
_MAX_WEIGHT = 40_000_000  # of one record: about 2 GB
_NEXT_ITEM = re.compile(r"[ \t\r\n,]*")


class UnreadableFile(Unusable):
    """A file cannot be read as a whole. The message names it."""


class BadRecord(Unusable):
    """A record of a file does not have the expected form. The message names the file, the record and the field."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A value of a file. `number` is its line, or its place in the file, counted from 1. `fault`: it cannot be read."""

    number: int
    value: Any
    fault: str = ""


def read_records(path: Path) -> Iterator[SourceRow]:
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
    except (OSError, UnicodeDecodeError, FileRefused) as error:
        raise UnreadableFile(f"{path} cannot be read: {why_unreadable(error)}") from error


def checked_records(path: Path, form: type[AnyBody]) -> Iterator[AnyBody]:
    """The records of a file, each of this form. Raises BadRecord for the first bad record, and UnreadableFile."""
    for record in read_records(path):
        if record.fault:
            raise BadRecord(f"{path}, record {record.number}: {record.fault}")
        yield checked(form, record.value, f"{path}, record {record.number}")


def checked(form: type[AnyBody], value: Any, place: str) -> AnyBody:
    """The value in this form. Raises BadRecord, which names the place."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        field, fault = first_fault(error)
        raise BadRecord(f"{place}: {fault if field == 'body' else f'{field}: {fault}'}") from None


def bounded_json(text: bytes | str) -> Any:
    """The value of a JSON text, in which no object has a key twice.

    Raises ValueError, which is RepeatedKey, or FileRefused for one with too many values for the memory.
    """
    _check_weight(text)
    return json_value(text)


def _check_weight(text: bytes | str) -> None:
    if json_weight(text, _MAX_WEIGHT) > _MAX_WEIGHT:
        raise FileRefused("a record holds too many values")


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


def _lines(file: IO[bytes]) -> Iterator[SourceRow]:
    for number, line in enumerate(bounded_lines(file), 1):
        if not line.strip():
            continue
        try:
            yield SourceRow(number, bounded_json(line))
        except (FileRefused, RepeatedKey) as error:
            yield SourceRow(number, None, str(error))
        except ValueError as error:
            yield SourceRow(number, None, f"not JSON: {error}")


def _array(path: Path, file: IO[str]) -> Iterator[SourceRow]:
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
            if len(text) - at > bounded_files.MAX_LINE_BYTES:
                raise FileRefused(
                    f"entry {number + 1} is longer than {bounded_files.MAX_LINE_BYTES // 1024**2} MiB"
                ) from None
            more = file.read(piece)
            if not more:
                raise UnreadableFile(f"{path}, entry {number + 1}: not JSON: {why_unreadable(error)}") from None
            text, at = text[at:] + more, 0
            if len(text) > _LIGHT_BYTES:
                try:
                    _check_weight(text)
                except RepeatedKey as error:
                    raise FileRefused(f"at entry {number + 1} or behind it: {error}") from None
            piece = min(2 * piece, bounded_files.MAX_LINE_BYTES)  # so that a long item is not scanned for each piece
            continue
        item, number, piece, at = text[at:end], number + 1, _PIECE, end
        try:
            _check_weight(item)
            yield SourceRow(number, value)
        except RepeatedKey as error:
            yield SourceRow(number, None, str(error))
