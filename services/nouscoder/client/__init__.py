"""The grading client, sync and async: `from nouscoder.client import Client`. Its only library is httpx."""

from __future__ import annotations

from nouscoder.client.async_client import AsyncClient, AsyncJob
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
from nouscoder.client.sync_client import Client, Job

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
