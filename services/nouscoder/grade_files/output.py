"""The output of `nouscoder grade`: one JSON line an entry, in the order of the entries, flushed line by line.

INVARIANT: an output never replaces a file that is read. A resumed output keeps its lines up to the first that is torn
or has no verdict because the service failed; each entry has exactly one line in the end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from nouscoder.atomic_files import naming_storage_faults
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable


class OutputFault(Unusable):
    """The output does not belong to the input. The message names the file."""


def refuse_input(out: Path | None, inputs: tuple[Path | None, ...]) -> None:
    """Raises OutputFault when the output is one of the inputs."""
    for given in inputs:
        if out is not None and given is not None and given.exists() and out.exists() and out.samefile(given):
            raise OutputFault(f"--out {out} is the input itself: give another file")


_BEGIN = b'{"id": '  # of each line


def kept_lines(out: Path) -> Iterator[dict[str, Any]]:
    """The lines of an earlier output that a resumed grading keeps. The file is cut after the last of them.

    Raises OutputFault for a file with other lines, which is not changed.
    """
    end, is_kept = 0, True
    try:
        with out.open("rb") as file:
            for line in file:
                record = _record(line)
                is_torn = not line.endswith(b"\n") and line[: len(_BEGIN)] == _BEGIN[: len(line)]
                if not ("id" in record and {"verdict", "error"} & record.keys()) and (record or not is_torn):
                    raise OutputFault(f"{out} holds lines that are no verdicts of this command: give another --out")
                is_kept = is_kept and line.endswith(b"\n") and _is_kept(record)
                if is_kept:
                    end += len(line)
                    yield record
        os.truncate(out, end)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputFault(f"{out} cannot be read: {error.strerror or error}") from error


def _record(line: bytes) -> dict[str, Any]:
    """The record of a line; empty when it holds none."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _is_kept(record: dict[str, Any]) -> bool:
    """Whether it is a verdict of the program, or a bad line: these are not graded again."""
    is_ours = record.get("verdict", VerdictKind.INTERNAL_ERROR.value) == VerdictKind.INTERNAL_ERROR.value
    return not is_ours or bool(record.get("bad_line"))


@contextmanager
def opened_output(out: Path | None, *, resume: bool) -> Iterator[TextIO]:
    """The output, stdout when there is no file. Raises StorageError."""
    if out is None:
        yield sys.stdout
        return
    is_new = not out.exists()
    with naming_storage_faults(out):
        file = out.open("a" if resume else "w", encoding="utf8")
    try:
        with file:
            yield file
    finally:
        if is_new and not out.stat().st_size:  # not even one verdict found room
            out.unlink()
