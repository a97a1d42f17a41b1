"""What the jobs of both clients share: the body of a job, and the reader of its results.

INVARIANT: a body is sent again as it was. The reader yields each result once, also when a connection breaks in it: it
counts only whole lines, and the next request continues after the last of them.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from nouscoder.client.errors import JobEnded
from nouscoder.client.records import JobAnswer, JobResult

WAIT_S = 20.0  # how long the service holds a request for results when there is none yet
PART_BYTES = 256 * 1024
_IN_MEMORY_BYTES = 16 * 1024**2
_LINES, _PARQUET = "application/x-ndjson", "application/vnd.apache.parquet"

Requests = Iterable[Mapping[str, Any]] | Path


@contextmanager
def opened_body(requests: Requests) -> Iterator[tuple[IO[bytes], str]]:
    """(body, content type). For requests that are not a file the body is empty, to be written. Raises OSError."""
    if isinstance(requests, Path):
        with requests.open("rb") as file:
            yield file, _PARQUET if requests.suffix == ".parquet" else _LINES
        return
    with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as body:
        yield cast("IO[bytes]", body), _LINES


def submit_arguments(
    content_type: str, priority: int, tests: bool, webhook: str | None, idempotency_key: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """(parameters, headers) of POST /v1/jobs. The key makes a repeated request find the job of the first."""
    parameters = {"priority": str(priority), "tests": "true" if tests else "false", "webhook": webhook or ""}
    return parameters, {"Content-Type": content_type, "Idempotency-Key": idempotency_key or secrets.token_hex(16)}


class ResultReader:
    """Takes the bytes of the results. `offset` is the end of the last whole line."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._rest = b""

    def parameters(self) -> dict[str, str]:
        """The parameters of the next request, which begins after the last whole line."""
        self._rest = b""
        return {"offset": str(self.offset), "wait_s": f"{WAIT_S:g}"}

    def feed(self, part: bytes) -> Iterator[JobResult]:
        """The results that this part completes."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            result = cast("JobResult", json.loads(line))
            self.offset += len(line) + 1
            yield result

    def is_ended(self, state: JobAnswer) -> bool:
        """Whether all results were read. Raises JobEnded when they are not those of all submissions."""
        if state["state"] in ("waiting", "running") or self.offset < state["results_bytes"]:
            return False
        if state["state"] != "finished":
            about = f"the job {state['id']} {state['state']} after {state['done']} of {state['total']} submissions"
            raise JobEnded(f"{about}: {state['detail']}")
        return True
