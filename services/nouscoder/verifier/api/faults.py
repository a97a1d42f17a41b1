"""The errors of the REST API: each exception of the service with its HTTP status, and their descriptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from nouscoder.atomic_files import StorageError
from nouscoder.http_server.body import BodyFault
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.verifier.access.stored_tests import StorageFull
from nouscoder.verifier.api.schema import Fault
from nouscoder.verifier.api.streaming import NotGraded
from nouscoder.verifier.grading.grader import QueueFull
from nouscoder.verifier.grading.validation import STORE_TESTS, InvalidSubmission, TooLarge
from nouscoder.verifier.jobs.folder import JobConflict, JobsFull, UnknownJob

FAULTS: dict[int | str, dict[str, Any]] = {
    401: {"model": Fault, "description": "A valid API key is required."},
    403: {"model": Fault, "description": "The service has no tokens, and the request comes from another site."},
    408: {"model": Fault, "description": "The body arrived too slowly."},
    413: {"model": Fault, "description": "The body has too many bytes or values: store its tests with PUT /v1/tests."},
    415: {"model": Fault, "description": "The body has a Content-Encoding, which is not undone here."},
    422: {"model": Fault, "description": "The request is invalid; `field` names the invalid part."},
    429: {"model": Fault, "description": "The queue or the client's quota is full; retry after Retry-After seconds."},
    503: {"model": Fault, "description": "The service is draining."},
    504: {"model": Fault, "description": "The X-Deadline-S of the request has passed."},
}
# What the document says of a call of another project, whose body that project defines.
AS_ELSEWHERE: dict[str, Any] = {
    "responses": FAULTS,
    "openapi_extra": {"requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}},
}


class Draining(Exception):
    """The service drains and accepts no submission."""


class UnknownForm(Exception):
    """The body has a form that the service does not read."""


class Absent(Exception):
    """The service does not offer the call. The message names the key that turns it on."""


def fault(status: int, detail: str, field: str | None = None, **headers: str) -> Response:
    """An answer with the fields of Fault."""
    return JSONResponse({"detail": detail, "field": field}, status, headers=headers)


def add_faults(app: FastAPI) -> None:
    """Map every exception of this service to its HTTP status."""
    for kind, answer in _ANSWERS.items():
        app.add_exception_handler(kind, _handler(answer))


def answer_to(error: Exception) -> Response | None:
    """The answer that an exception of this service gives; None for any other."""
    found = next((answer for kind in type(error).__mro__ if (answer := _ANSWERS.get(kind))), None)
    return None if found is None else found(error)


def _handler(answer: Callable[[Any], Response]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(_: Request, error: Exception) -> Response:
        return answer(error)

    return handle


_INSTEAD = {413: f"; {STORE_TESTS}"}
_ANSWERS: dict[type, Callable[[Any], Response]] = {
    TooLarge: lambda error: fault(413, str(error), error.field),
    InvalidSubmission: lambda error: fault(422, str(error), error.field),
    BodyFault: lambda error: fault(error.status, f"body: {error}{_INSTEAD.get(error.status, '')}", "body"),
    ClientDisconnect: lambda _: fault(499, "body: the client disconnected", "body"),
    QueueFull: lambda error: fault(429, str(error), **{"Retry-After": str(error.retry_after_s)}),
    StorageFull: lambda error: fault(409, str(error), "tests"),
    BlobsUnavailable: lambda error: fault(503, f"the test store: {error}", **{"Retry-After": "5"}),
    Draining: lambda _: fault(503, "the service is draining", **{"Retry-After": "1"}),
    NotGraded: lambda error: fault(503, str(error), **{"Retry-After": "1"}),
    UnknownForm: lambda error: fault(415, str(error), "Content-Type"),
    Absent: lambda error: fault(501, str(error)),
    UnknownJob: lambda error: fault(404, str(error), "job_id"),
    JobConflict: lambda error: fault(409, str(error), "Idempotency-Key"),
    JobsFull: lambda error: fault(409, str(error), "body"),
    StorageError: lambda error: fault(507, str(error), "body"),
}
