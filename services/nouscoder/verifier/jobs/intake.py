"""Receives a job: its body goes to the disk as it arrives, and becomes the file of its submissions.

INVARIANT: nothing of a body stays in memory but the part that arrives. A body that is refused, too slow or cut leaves
nothing behind. A job exists from the moment when all of it is on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from nouscoder.http_server.body import run_apart, write_body
from nouscoder.verifier.access.caller import Caller
from nouscoder.verifier.grading.validation import STORE_TESTS, InvalidSubmission
from nouscoder.verifier.jobs.folder import JobFolder, JobOptions
from nouscoder.verifier.jobs.store import JobStore, Upload

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
        "nouscoder.verifier.jobs.parquet_lines", sent, upload.requests, max_bytes, patience_s=_PARQUET_PATIENCE_S
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
