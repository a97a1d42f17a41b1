"""One job on the disk.

    ID/job.json        what the client asked for
    ID/requests.jsonl  the submissions, one a line; deleted at the end
    ID/results.jsonl   one line for each graded submission, in order of completion
    ID/end.json        how it ended
    ID/webhook.json    whether its server was told

INVARIANT: each submission has at most one result, and a result never changes or moves, so a reader may continue at the
byte where it stopped. A killed service loses at most results that were not written: those submissions are graded again.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, deque
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nouscoder.atomic_files import write_whole
from nouscoder.errors import NousCoderError
from nouscoder.http_server.api_keys import Quota
from nouscoder.http_server.fair_queue import QueueFull
from nouscoder.record_log import LogUnusable, RecordLog
from nouscoder.verifier.access.caller import Caller

# The records of a job: what its client asked for, how it ended, and its state as the API shows it.

MAX_PRIORITY = 9


class JobState(StrEnum):
    """The state of a job. The last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    EXPIRED = "expired"
    FAILED = "failed"


class WebhookState(StrEnum):
    """Whether the server that the job names knows of its end."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    FAILED = "failed"


class UnknownJob(NousCoderError):
    """The client has no job of this id."""


class JobConflict(NousCoderError):
    """The request does not fit the state of the job."""


class JobsFull(NousCoderError):
    """The client, or all clients together, have as many jobs, submissions or bytes of jobs as they may."""


class UploadsFull(QueueFull):
    """Too many jobs are being received."""


class JobOptions(BaseModel):
    """What a client may ask of a job, as parameters of the URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    priority: int = Field(0, ge=0, le=MAX_PRIORITY, description="of the client's jobs, higher ones are graded first")
    tests: bool = Field(False, description="results have the outcome of each test")
    webhook: str = Field("", max_length=2000, description="URL that gets the job's state once it has ended")


class JobRecord(BaseModel):
    """A job as its client sent it. It never changes."""

    model_config = ConfigDict(frozen=True)

    job_id: str
    client: str
    max_in_flight: int | None
    submissions_per_minute: int | None
    options: JobOptions
    created_s: float
    total: int

    def caller(self, number: int) -> Caller:
        """The caller of one of its submissions."""
        quota = Quota(self.max_in_flight, self.submissions_per_minute)
        return Caller(self.client, f"{self.job_id}/{number}", quota, in_background=True)


class JobEnd(BaseModel):
    """How a job ended."""

    model_config = ConfigDict(frozen=True)

    state: JobState
    ended_s: float
    detail: str = ""


class JobAnswer(BaseModel):
    """The state of a job."""

    id: str
    state: JobState
    total: int = Field(description="submissions")
    done: int = Field(description="submissions that have a result")
    verdicts: dict[str, int] = Field(description="results by verdict")
    errors: int = Field(description="results without a verdict: `error` says why")
    results_bytes: int = Field(description="size of the results so far; `offset` starts at 0 and ends here")
    priority: int
    webhook: WebhookState | None
    created_s: float = Field(description="seconds since 1970")
    ended_s: float | None
    removed_s: float | None = Field(description="when the job will be removed, with its results")
    detail: str = ""


class JobsAnswer(BaseModel):
    """The jobs of a client, the newest first."""

    jobs: list[JobAnswer]


RECORD, REQUESTS, RESULTS, END, WEBHOOK = "job.json", "requests.jsonl", "results.jsonl", "end.json", "webhook.json"
_AHEAD_BYTES = 256 * 1024  # requests that are read at once


class JobBroken(NousCoderError):
    """The folder of a job cannot be read. The message names it."""


class JobFolder:
    """Opened by `opened`, which reads what an earlier service left."""

    def __init__(self, path: Path, record: JobRecord, log: RecordLog, end: JobEnd | None, told: WebhookState) -> None:
        self.path = path
        self.record = record
        self.ended = end
        self.told = told
        self.lock = asyncio.Lock()  # held while a thread works on the files
        self.in_flight: set[asyncio.Task[dict[str, Any]]] = set()
        self.progressed = asyncio.Event()  # set at each change, and replaced then
        self.num_open = 0  # submissions that were taken and have no result yet
        self.is_removed = False
        self.is_read = False  # each submission is in progress or has a result
        self._verdicts: Counter[str] = Counter()
        self._errors = 0
        self._log: RecordLog | None = log
        self.results_bytes = log.num_bytes  # of the results that a reader may have
        self._requests: BinaryIO | None = None
        self._number = 0  # of the next line that has a submission
        self._ahead: deque[tuple[int, bytes]] = deque()
        for key in log:
            self._count(log.get(key))
        if end is not None:
            self.close()

    @classmethod
    def opened(cls, path: Path) -> JobFolder:
        """The job of a folder. Blocks while it reads the results. Raises JobBroken and StorageError."""
        try:
            record = JobRecord.model_validate_json((path / RECORD).read_bytes())
            end, webhook = path / END, path / WEBHOOK
            ended = JobEnd.model_validate_json(end.read_bytes()) if end.exists() else None
            told = WebhookState(webhook.read_text()) if webhook.exists() else WebhookState.WAITING
            return cls(path, record, RecordLog(path / RESULTS, "id"), ended, told)
        except (OSError, ValidationError, ValueError, LogUnusable) as error:
            raise JobBroken(f"the job {path} cannot be read: {str(error).splitlines()[0]}") from error

    @property
    def num_done(self) -> int:
        """Submissions that have a result."""
        return self._verdicts.total() + self._errors

    @property
    def num_left(self) -> int:
        """Submissions that will still be graded."""
        return 0 if self.ended is not None else self.record.total - self.num_done

    @property
    def num_bytes(self) -> int:
        """What the job takes on the disk."""
        requests = self.path / REQUESTS
        return self.results_bytes + (requests.stat().st_size if requests.exists() else 0)

    def next_request(self) -> tuple[int, bytes] | None:
        """(number, line) of the next submission without a result; None at the end. Blocks. Raises OSError."""
        while not self._ahead and self._read_ahead():
            pass
        return self._ahead.popleft() if self._ahead else None

    def _read_ahead(self) -> bool:
        """Read some lines. Returns whether there may be more."""
        if self._requests is None:
            self._requests = (self.path / REQUESTS).open("rb")
        for line in self._requests.readlines(_AHEAD_BYTES):
            if line.strip():
                if self._log is not None and str(self._number) not in self._log:
                    self._ahead.append((self._number, line))
                self._number += 1
        return self._number < self.record.total

    def add_result(self, number: int, result: dict[str, Any]) -> None:
        """Write the result of a submission. Raises StorageError."""
        if self._log is None:
            return
        self._log.add(str(number), result)
        self.results_bytes = self._log.num_bytes
        self._count(result)
        self.notify()

    def end(self, end: JobEnd) -> None:
        """Write how the job ended. Blocks. Raises StorageError."""
        if self._log is not None:
            self._log.sync()
        write_whole(self.path / END, end.model_dump_json().encode())
        self.ended = end
        self.close()
        (self.path / REQUESTS).unlink(missing_ok=True)

    def tell(self, state: WebhookState) -> None:
        """Write whether the server was told. Blocks. Raises StorageError."""
        write_whole(self.path / WEBHOOK, state.value.encode())
        self.told = state

    def read_results(self, offset: int, size: int) -> bytes:
        """At most `size` bytes of the results from `offset`. Blocks. Raises OSError."""
        with (self.path / RESULTS).open("rb") as file:
            file.seek(offset)
            return file.read(min(size, max(0, self.results_bytes - offset)))

    def remove(self) -> None:
        """Delete the folder. Blocks. The record goes first, so that a half deleted folder is no job."""
        self.close()
        (self.path / RECORD).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def cancel(self) -> None:
        """Cancel what is graded of it."""
        for task in self.in_flight:
            task.cancel()

    def notify(self) -> None:
        """Wake those who wait for progress."""
        self.progressed.set()
        self.progressed = asyncio.Event()

    def answer(self, keep_s: float) -> JobAnswer:
        """The state, for a service that keeps jobs for `keep_s` seconds after their end."""
        end, options = self.ended, self.record.options
        return JobAnswer(
            id=self.record.job_id,
            state=end.state if end is not None else JobState.RUNNING if self.num_done else JobState.WAITING,
            total=self.record.total,
            done=self.num_done,
            verdicts=dict(self._verdicts),
            errors=self._errors,
            results_bytes=self.results_bytes,
            priority=options.priority,
            webhook=self.told if options.webhook else None,
            created_s=self.record.created_s,
            ended_s=None if end is None else end.ended_s,
            removed_s=None if end is None else end.ended_s + keep_s,
            detail="" if end is None else end.detail,
        )

    def _count(self, result: dict[str, Any]) -> None:
        if "verdict" in result:
            self._verdicts[result["verdict"]] += 1
        else:
            self._errors += 1

    def close(self) -> None:
        """Close the files."""
        if self._log is not None:
            self._log.close()
        if self._requests is not None:
            self._requests.close()
        self._log = self._requests = None
        self._ahead.clear()
