"""The errors of the grading client: one tree under GradingFailed.

| class | why | tried again |
|---|---|---|
| AuthenticationFailed | no valid API key (401), or the service refuses the site (403) | no |
| BadRequest | the request cannot be graded; `field` names the part at fault | no |
| StorageFull | the client, or all clients, have as many stored tests or jobs as they may (409) | no |
| TlsFailed | TLS: an untrusted certificate, or a missing one | no |
| UnknownHost | the host name does not exist | no |
| Unreachable | the service does not answer | for Patience.unreachable_s |
| Overloaded | the queue or the quota is full (429), or the service drains (503) | for Patience.busy_s |
| JobEnded | a job ended before all its submissions were graded | no |
| DeadlinePassed | the deadline of the request, or the timeout for one answer, has passed | no |

Only this module turns answers and the errors of httpx into these classes.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import Any

import httpx

from nouscoder.errors import ExitCode, NousCoderError

_RUN_CODE_BUSY = 504  # what POST /run_code answers when it found no slot; its usual clients repeat only that
_BAD_REQUEST = frozenset({400, 404, 405, 408, 409, 413, 414, 415, 422, 431})
_DEADLINE_FIELD = "X-Deadline-S"
_KEY_FIELD = "Idempotency-Key"  # of a 409: another request of the same key is in progress


class GradingFailed(NousCoderError):
    """The service gave no verdict. The message says why. `status` is the HTTP status, 0 when there was no answer."""

    is_passing = False  # whether the same request can succeed later

    def __init__(self, message: str, status: int = 0, request_id: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.request_id = request_id


class AuthenticationFailed(GradingFailed):
    """The API key is missing or invalid, or the service refuses requests from this site."""

    exit_code = ExitCode.UNUSABLE


class BadRequest(GradingFailed):
    """The request is at fault. `field` names the part, such as `limits.wall_time_s`; "" when it is not known."""

    def __init__(self, message: str, status: int = 0, request_id: str = "", field: str = "") -> None:
        super().__init__(message, status, request_id)
        self.field = field


class StorageFull(GradingFailed):
    """No more tests or jobs can be stored, until the client deletes some or they expire."""

    exit_code = ExitCode.UNUSABLE


class TlsFailed(GradingFailed):
    """The two sides do not trust each other's certificates, or one of them does not speak TLS."""

    exit_code = ExitCode.UNUSABLE


class Unreachable(GradingFailed):
    """The service does not answer."""

    exit_code = ExitCode.UNAVAILABLE
    is_passing = True


class UnknownHost(Unreachable):
    """The host name of the URL does not exist."""

    is_passing = False


class Overloaded(GradingFailed):
    """The queue or the client's quota is full, or the service drains."""

    exit_code = ExitCode.UNAVAILABLE
    is_passing = True


class JobEnded(GradingFailed):
    """A job ended before all its submissions were graded. The results that it has were yielded before."""


class DeadlinePassed(GradingFailed):
    """There was no answer in time."""

    exit_code = ExitCode.UNAVAILABLE


def failure_of(response: httpx.Response) -> GradingFailed:
    """The error of an answer whose status is not 200."""
    record, status = record_of(response), response.status_code
    field = record.get("field") or ""
    detail = record.get("detail") or response.text[:200] or response.reason_phrase
    about = (f"HTTP {status}: {detail}", status, response.headers.get("x-request-id", ""))
    if status in (401, 403):
        return AuthenticationFailed(*about)
    if status == 507 or (status == 409 and field != _KEY_FIELD):
        return StorageFull(*about)
    if status in _BAD_REQUEST:
        return BadRequest(*about, field=str(field))
    if status in (429, 502, 503) or (status == _RUN_CODE_BUSY and field != _DEADLINE_FIELD):
        return Overloaded(*about)
    if status == 504:
        return DeadlinePassed(*about)
    return GradingFailed(*about)


def failure_of_transport(error: httpx.TransportError, service: str = "the grading service") -> GradingFailed:
    """The error of a request without an answer."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, httpx.UnsupportedProtocol):
        return BadRequest(f"the URL of {service} is not usable: {error}", field="url")
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        return DeadlinePassed(f"{service} does not answer in time: {reason}")
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return TlsFailed(f"TLS with {service} fails: {cause}")
        if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
            return UnknownHost(f"{service} does not answer: its host name is not known: {cause}")
    return Unreachable(f"{service} does not answer: {reason}")


def record_of(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer; {} when it holds something else."""
    try:
        record = response.json()
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that caused it, also the members of groups (a host with several addresses)."""
    waiting, seen = [error], set[int]()
    while waiting:
        cause = waiting.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [other for other in (cause.__cause__, cause.__context__) if other is not None]
        if isinstance(cause, BaseExceptionGroup):
            waiting += cause.exceptions
