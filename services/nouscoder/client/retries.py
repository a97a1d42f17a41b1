"""One request of the client: its headers, its deadline, and when it is sent again.

INVARIANT: a request is sent again only after a failure that can pass, and only while the total wait for failures of
that kind is below its limit in Patience and the deadline has not passed. Grading has no side effects, so a request may
be sent twice.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from nouscoder.client.errors import (
    DeadlinePassed,
    GradingFailed,
    Unreachable,
    failure_of,
    failure_of_transport,
    record_of,
)

TOKEN_ENVIRONMENT = "NOUSCODER_TOKEN"
_CONNECT_S = 10.0
_MAX_BACKOFF_S = 5.0
_MAX_DELAY_S = 60.0
_NO_TIME_S = 0.001

_SILENT_S = 1.0  # shorter waits are not logged

Outcome = httpx.Response | httpx.TransportError


class _AtMostEvery(logging.Filter):
    """Passes one record in `seconds`, because all requests fail at the same time while a service is away."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._passed_s = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the last one is old enough."""
        if record.created - self._passed_s < self._seconds:
            return False
        self._passed_s = record.created
        return True


log = logging.getLogger(__name__)
log.addFilter(_AtMostEvery(5.0))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client retries, by the kind of failure. Other failures are raised at once."""

    timeout_s: float = 660.0  # for one answer
    busy_s: float = 300.0  # total wait while the queue is full or the service drains
    unreachable_s: float = 15.0  # total wait while the service does not answer
    internal_retries: int = 2  # retries after internal_error

    def limit_s(self, failure: GradingFailed) -> float:
        """The total wait in seconds for a request that fails like this."""
        if not failure.is_passing:
            return 0.0
        return self.unreachable_s if isinstance(failure, Unreachable) else self.busy_s


@dataclass(slots=True)
class Attempts:
    """The attempts of one request. `deadline_s` bounds all of them together."""

    patience: Patience
    request_id: str | None = None
    deadline_s: float | None = None
    _attempt: int = 0
    _waited_s: float = 0.0
    _begun_s: float = field(default_factory=time.monotonic)

    def send_arguments(self, more_headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Headers and timeout of the next attempt, as httpx takes them. Raises DeadlinePassed."""
        headers, timeout_s = dict(more_headers or {}), self.patience.timeout_s
        if self.request_id is not None:
            headers["X-Request-Id"] = self.request_id
        left_s = self._left_s()
        if left_s < _NO_TIME_S:
            message = f"the deadline of {self.deadline_s:g} s has passed"
            raise DeadlinePassed(message, request_id=self.request_id or "")
        if left_s < math.inf:
            headers["X-Deadline-S"] = f"{left_s:.3f}"
            timeout_s = min(timeout_s, left_s + 1.0)  # the service's own answer to a late request comes first
        return {"headers": headers, "timeout": httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s))}

    def next_delay_s(self, outcome: Outcome) -> float | None:
        """Seconds to wait before the next attempt; None when `outcome` is an answer to return. Raises GradingFailed."""
        if isinstance(outcome, httpx.Response) and outcome.is_success:
            record = record_of(outcome)
            if not record:
                status = outcome.status_code
                raise GradingFailed(f"HTTP {status}, but not the grading API: the answer is not a JSON object", status)
            if not _is_ours(record) or self._attempt >= self.patience.internal_retries:
                return None
            delay_s = self._delay_s(None)
            return delay_s if delay_s < self._left_s() else None
        failure, cause, retry_after = _failure(outcome)
        failure.request_id = failure.request_id or self.request_id or ""
        if self._waited_s >= self.patience.limit_s(failure):
            raise failure from cause
        delay_s = self._delay_s(retry_after)
        if isinstance(failure, Unreachable) and self._waited_s > _SILENT_S:
            # In the message itself: programs that use the client print it without the fields of `extra`.
            left_s = max(0.0, self.patience.limit_s(failure) - self._waited_s)
            log.warning("%s; it is tried for %.0f s more", failure, left_s)
        if delay_s >= self._left_s():
            message = f"{failure}; the deadline of {self.deadline_s:g} s passes before the next attempt"
            raise DeadlinePassed(message, failure.status, failure.request_id) from cause
        return delay_s

    def _delay_s(self, retry_after: str | None) -> float:
        asked_s = float(retry_after) if retry_after is not None and retry_after.isdigit() else 0.0
        backoff_s = min(_MAX_BACKOFF_S, 0.1 * 2.0 ** min(self._attempt, 10))
        delay_s = min(_MAX_DELAY_S, max(asked_s, backoff_s)) * random.uniform(0.7, 1.0)
        self._attempt += 1
        self._waited_s += delay_s
        return delay_s

    def _left_s(self) -> float:
        if self.deadline_s is None:
            return math.inf
        return self.deadline_s - (time.monotonic() - self._begun_s)


def authorization(token: str | None) -> dict[str, str]:
    """The header for `token`, or for the key in the environment."""
    token = token if token is not None else os.environ.get(TOKEN_ENVIRONMENT, "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _is_ours(record: Mapping[str, Any]) -> bool:
    """Whether the service failed, not the program: a verdict of internal_error, or a run in a broken sandbox."""
    return record.get("verdict") == "internal_error" or record.get("status") == "SandboxError"


def _failure(outcome: Outcome) -> tuple[GradingFailed, httpx.TransportError | None, str | None]:
    """(error, its cause, Retry-After)."""
    if isinstance(outcome, httpx.Response):
        return failure_of(outcome), None, outcome.headers.get("retry-after")
    return failure_of_transport(outcome), outcome, None
