"""The audit log: one JSON line per submission. It holds no tests, and programs only if the configuration asks for them.

INVARIANT: every submission that passed the API key check and could be parsed leaves exactly one line, whether it got a
verdict, was refused or was cancelled by its client.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from nouscoder.domain.submission import Submission, TestsReference
from nouscoder.domain.verdict import Verdict
from nouscoder.errors import Unusable
from nouscoder.input_file import regular
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.grading.grader import GraderDecorator, Grading, OnOutcome


def _private(path: str, flags: int) -> int:
    """Opens a file; a new one is for this user only, because it may hold programs of clients."""
    return os.open(path, flags, 0o600)


class AuditLog:
    """Appends to a file. Each line is written before the answer is sent."""

    def __init__(self, file: Path, with_source: bool = False) -> None:
        """Raises Unusable."""
        self._path = file
        self._with_source = with_source
        self._file = self._open()

    def _open(self) -> TextIO:
        try:
            if self._path.exists():  # opening a pipe waits for its reader
                regular(self._path)
            return open(self._path, "a", encoding="utf8", buffering=1, opener=_private)
        except OSError as error:
            raise Unusable(f"the audit log {self._path} cannot be written: {error.strerror or error}") from error

    def reopen(self) -> None:
        """Open the path again after the file was moved away."""
        old, self._file = self._file, self._open()
        old.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, source: str, **fields: Any) -> None:
        """Write one line: time, client and request id of the current caller, `fields`, and the source's SHA-256."""
        caller = current_caller()
        now_s = time.time()
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s * 1000) % 1000:03d}Z",
            "client": caller.client,
            "request_id": caller.request_id,
            **fields,
            "source_sha256": hashlib.sha256(source.encode("utf8", "surrogatepass")).hexdigest(),
        }
        if self._with_source:
            record["source"] = source
        self._file.write(json.dumps(record) + "\n")


class AuditedGrader(GraderDecorator):
    """Grades with `inner` and writes a line to the audit log for every submission."""

    def __init__(self, inner: Grading, audit: AuditLog) -> None:
        super().__init__(inner)
        self._audit = audit

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """See `Grader.grade`."""
        begun_s = time.monotonic()
        verdict: Verdict | None = None
        refused = ""
        try:
            verdict = await self._inner.grade(submission, on_outcome)
        except BaseException as error:
            refused = type(error).__name__
            raise
        finally:
            self._audit.write(
                submission.code if submission.code is not None else submission.completion or "",
                language=submission.language,
                num_tests=0 if isinstance(submission.tests, TestsReference) else len(submission.tests.cases),
                verdict=None if verdict is None else verdict.kind.value,
                passed=None if verdict is None else verdict.passed,
                cached=verdict is not None and verdict.cached,
                refused=refused,
                duration_s=round(time.monotonic() - begun_s, 6),
            )
        return verdict
