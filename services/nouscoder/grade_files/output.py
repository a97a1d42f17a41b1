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

from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable


class OutputFault(Unusable):
    """The output cannot be written, or does not belong to the input. The message names the file."""


def refuse_input(out: Path | None, inputs: tuple[Path | None, ...]) -> None:
    """Raises OutputFault when the output is one of the inputs."""
    for given in inputs:
        if out is not None and given is not None and given.exists() and out.exists() and out.samefile(given):
            raise OutputFault(f"--out {out} is the input itself: give another file")


def kept_lines(out: Path) -> Iterator[dict[str, Any]]:
    """The lines of an earlier output that a resumed grading keeps. The file is cut after the last of them."""
    end = 0
    try:
        with out.open("rb") as file:
            for line in file:
                record = _kept(line)
                if record is None:
                    break
                end += len(line)
                yield record
        os.truncate(out, end)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputFault(f"{out} cannot be read: {error.strerror or error}") from error


def _kept(line: bytes) -> dict[str, Any] | None:
    """The record of a whole line with a verdict, or of a bad line; None for every other."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(record, dict) or "id" not in record:
        return None
    has_verdict = record.get("verdict", VerdictKind.INTERNAL_ERROR.value) != VerdictKind.INTERNAL_ERROR.value
    return record if has_verdict or record.get("bad_line") else None


@contextmanager
def opened_output(out: Path | None, *, resume: bool) -> Iterator[TextIO]:
    """The output, stdout when there is no file. Raises OutputFault."""
    if out is None:
        yield sys.stdout
        return
    try:
        file = out.open("a" if resume else "w", encoding="utf8")
    except OSError as error:
        raise OutputFault(f"{out} cannot be written: {error.strerror or error}") from error
    with file:
        yield file
