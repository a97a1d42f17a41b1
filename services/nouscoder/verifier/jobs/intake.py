"""Receives a job: its body goes to the disk as it arrives, and becomes the file of its submissions.

A parquet file has a row for each submission, with a column for each field; a null is a field that is not given. A
process of its own, `python -m nouscoder.verifier.jobs.intake IN OUT MAX_BYTES`, turns it into lines, with limits of
memory and time, because it decodes what a client sent. It exits with 1 and one sentence on stderr.

INVARIANT: nothing of a body stays in memory but the part that arrives. A body that is refused, too slow or cut leaves
nothing behind. A job exists from the moment when all of it is on the disk.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nouscoder.http_server.body import run_apart, write_body
from nouscoder.installation import how_to_install
from nouscoder.verifier.access.caller import Caller
from nouscoder.verifier.grading.validation import STORE_TESTS, InvalidSubmission
from nouscoder.verifier.jobs.folder import JobFolder, JobOptions
from nouscoder.verifier.jobs.store import JobStore, Upload

MEMORY_BYTES = 4 * 1024**3
CPU_TIME_S = 600
_BATCH_ROWS = 64
_PARQUET_PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True)
class JobBody:
    """The body of a request for a job."""

    parts: AsyncIterator[bytes]
    is_parquet: bool = False


async def receive(
    store: JobStore, caller: Caller, job_id: str, options: JobOptions, body: JobBody, max_line_bytes: int
) -> JobFolder:
    """The new job, whose submissions have at most `max_line_bytes` each.

    Raises InvalidSubmission, BodyFault, JobsFull, JobConflict and StorageError.
    """
    with store.upload(caller, job_id) as upload:
        if body.is_parquet:
            sent = upload.path / "requests.parquet"
            await write_body(body.parts, sent, upload.charge)
            await _convert(sent, upload, store.bounds.client_bytes)
        else:
            await write_body(body.parts, upload.requests, upload.charge)
        total = await asyncio.to_thread(_count_lines, upload.requests, max_line_bytes)
        return await store.add(upload, options, total)


async def _convert(sent: Path, upload: Upload, max_bytes: int) -> None:
    """Turn a parquet file into the file of submissions. Raises InvalidSubmission and JobsFull."""
    code, _, stderr = await run_apart(
        "nouscoder.verifier.jobs.intake", sent, upload.requests, max_bytes, patience_s=_PARQUET_PATIENCE_S
    )
    if code is None:
        raise InvalidSubmission("body", "the parquet file takes too long to read")
    if code == 1:
        raise InvalidSubmission("body", stderr.decode("utf8", "replace")[-500:])
    if code:
        raise InvalidSubmission("body", "the parquet file cannot be read within the limits of memory and time")
    upload.charge(await asyncio.to_thread(_replaced, sent, upload.requests))


def _replaced(old: Path, new: Path) -> int:
    """Delete `old`. Returns how many bytes more `new` has."""
    more = new.stat().st_size - old.stat().st_size
    old.unlink()
    return more


def _count_lines(file: Path, max_line_bytes: int) -> int:
    """The number of submissions. Blocks. Raises InvalidSubmission naming the line."""
    total = number = 0
    with file.open("rb") as lines:
        while line := lines.readline(max_line_bytes + 1):
            number += 1
            if len(line) > max_line_bytes:
                raise InvalidSubmission("body", f"line {number} has more than {max_line_bytes} bytes; {STORE_TESTS}")
            if not (text := line.strip()):
                continue
            total += 1
            if total == 1 and not text.startswith(b"{"):
                raise InvalidSubmission("body", f"line {number} is not a JSON object: send one submission a line")
    if not total:
        raise InvalidSubmission("body", "holds no submission")
    return total


# The process that converts.


class _Unreadable(Exception):
    """The message says why."""


def main(source: str, target: str, max_bytes: int) -> None:
    """Convert `source` to `target`. Raises _Unreadable."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_TIME_S, CPU_TIME_S))
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise _Unreadable(f"this service cannot read parquet: it needs {how_to_install('data')}") from None
    try:
        file = parquet.ParquetFile(source)
        with open(target, "wb") as output:
            for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
                for row in batch.to_pylist():
                    output.write(_line(row))
                    if output.tell() > max_bytes:
                        raise _Unreadable(f"its submissions have more than {max_bytes} bytes")
    except (pyarrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise _Unreadable(f"not a parquet file that can be read: {str(error).splitlines()[0]:.200}") from None


def _line(row: dict[str, Any]) -> bytes:
    given = {name: value for name, value in row.items() if value is not None}
    try:
        return json.dumps(given, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise _Unreadable(f"a row is no JSON: {error}") from None


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except (_Unreadable, MemoryError) as error:
        sys.stderr.write(str(error) or "it needs too much memory")
        sys.exit(1)
