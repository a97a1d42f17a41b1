"""The records of a job: what its client asked for, how it ended, and its state as the API shows it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from nouscoder.errors import NousCoderError
from nouscoder.http_server.api_keys import Quota
from nouscoder.verifier.access.caller import Caller
from nouscoder.verifier.grading.fair_queue import QueueFull

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

    def __init__(self) -> None:
        super().__init__(5)
        self.args = ("too many jobs are being received; retry",)


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
