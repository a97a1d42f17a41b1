"""The calls of the API, which both clients share: paths, bodies, events of a stream, results of a job.

Tests that are too large for a request are stored by the client, and the request names their digest. INVARIANT: such
tests are sent once for all requests with them, as long as the client is open and the service keeps them.

INVARIANT: a body is sent again as it was. The reader yields each result once, also when a connection breaks in it: it
counts only whole lines, and the next request continues after the last of them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from nouscoder.client.errors import BadRequest, DeadlinePassed, JobEnded, Unreachable
from nouscoder.client.records import GradeAnswer, JobAnswer, JobResult, OutcomeAnswer

GRADE_PATH = "/v1/grade"
STREAM_PATH = "/v1/grade/stream"
TESTS_PATH = "/v1/tests"
RUN_CODE_PATH = "/run_code"
JOBS_PATH = "/v1/jobs"
INLINE_BYTES = 8 * 1024**2  # of a request; the service refuses larger ones
JSON = {"Content-Type": "application/json"}
_MOST_KEPT = 4096


def encoded(record: Mapping[str, Any]) -> bytes:
    """The JSON of a record. The service reads half of a surrogate pair as U+FFFD.

    Raises BadRequest for a value that has no JSON form.
    """
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the request has no JSON form: {error}") from None


def tests_to_store(record: Mapping[str, Any]) -> bytes | None:
    """The JSON of a request's tests; None when they are a digest already, or no tests."""
    tests = record.get("tests")
    if isinstance(tests, str):
        return tests.encode()
    return encoded(tests) if isinstance(tests, Mapping) and "digest" not in tests else None


class StoredDigests:
    """The digests of tests that the service keeps, by the SHA-256 of their JSON. May be shared between threads."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, str] = OrderedDict()

    def of(self, tests: bytes) -> str | None:
        """The digest of tests that were stored before."""
        return self._digests.get(hashlib.sha256(tests).digest())

    def keep(self, tests: bytes, digest: str) -> str:
        """Remember the digest, and return it."""
        self._digests[hashlib.sha256(tests).digest()] = digest
        while len(self._digests) > _MOST_KEPT:
            self._digests.popitem(last=False)
        return digest

    def can_help(self, record: Mapping[str, Any], error: BadRequest) -> bool:
        """Whether a request that failed can succeed once its tests are stored, or stored again."""
        tests = tests_to_store(record) if error.status == 413 or error.field == "tests.digest" else None
        if tests is None:
            return False
        self._digests.pop(hashlib.sha256(tests).digest(), None)
        return True


def run_code_record(
    code: str,
    language: str,
    stdin: str,
    run_timeout_s: float,
    memory_limit_mb: int | None,
    files: Mapping[str, bytes] | None,
    fetch: Sequence[str] = (),
) -> dict[str, Any]:
    """The body of POST /run_code, with SandboxFusion's names. `memory_limit_mb` None is the service's default."""
    return {
        "code": code,
        "language": language,
        "stdin": stdin,
        "run_timeout": run_timeout_s,
        "memory_limit_MB": -1 if memory_limit_mb is None else memory_limit_mb,
        "files": {name: base64.b64encode(content).decode() for name, content in (files or {}).items()},
        "fetch_files": list(fetch),
    }


WAIT_S = 20.0  # how long the service holds a request for results when there is none yet
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


Event = OutcomeAnswer | GradeAnswer


@dataclass(slots=True)
class EventReader:
    """Takes the lines of one stream of POST /v1/grade/stream. `begun`: an event came. `ended`: it was the verdict."""

    begun: bool = False
    ended: bool = False
    _name: str = ""

    def feed(self, line: str) -> Event | None:
        """The event that this line completes. Raises DeadlinePassed when it says that the deadline has passed."""
        name, _, value = line.partition(": ")
        if name == "event":
            self._name = value
        if name != "data":
            return None
        record = json.loads(value)
        if self._name == "fault":
            raise DeadlinePassed(str(record.get("detail")))
        self.begun, self.ended = True, self._name == "verdict"
        return cast("Event", record)

    def finish(self) -> None:
        """Call at the end of the stream. Raises Unreachable when the verdict is missing."""
        if not self.ended:
            raise Unreachable("the grading service ended the stream before the verdict")
