"""The grading client, sync and async: `from nouscoder.client import Client`. Its only library is httpx."""

from __future__ import annotations

from nouscoder.client.async_client import AsyncClient
from nouscoder.client.async_job import AsyncJob
from nouscoder.client.errors import (
    AuthenticationFailed,
    BadRequest,
    DeadlinePassed,
    GradingFailed,
    JobEnded,
    Overloaded,
    StorageFull,
    TlsFailed,
    UnknownHost,
    Unreachable,
)
from nouscoder.client.job import Job
from nouscoder.client.records import (
    Comparator,
    GradeAnswer,
    GradeRequest,
    JobAnswer,
    JobResult,
    Limits,
    OutcomeAnswer,
    RunAnswer,
)
from nouscoder.client.retries import Patience
from nouscoder.client.sync_client import Client

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AuthenticationFailed",
    "BadRequest",
    "Client",
    "Comparator",
    "DeadlinePassed",
    "GradeAnswer",
    "GradeRequest",
    "GradingFailed",
    "Job",
    "JobAnswer",
    "JobEnded",
    "JobResult",
    "Limits",
    "OutcomeAnswer",
    "Overloaded",
    "Patience",
    "RunAnswer",
    "StorageFull",
    "TlsFailed",
    "UnknownHost",
    "Unreachable",
]
