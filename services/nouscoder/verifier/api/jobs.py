"""The REST calls of jobs. Handlers convert, call `Jobs` and convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nouscoder.formats.body import first_fault
from nouscoder.http_server.memory_budget import stored_parts
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.api.faults import FAULTS, UnknownForm, fault
from nouscoder.verifier.api.schema import Fault
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.jobs.folder import JobAnswer, JobOptions, JobsAnswer
from nouscoder.verifier.jobs.intake import JobBody
from nouscoder.verifier.jobs.service import MAX_WAIT_S, Jobs

_JSON = "application/json"
_LINES = "application/x-ndjson"
_PARQUET = "application/vnd.apache.parquet"
_MAX_KEY_CHARS = 200
Query = TypeVar("Query", bound=BaseModel)
_UNKNOWN: dict[int | str, dict[str, Any]] = {
    404: {"model": Fault, "description": "The client has no such job, or it was removed."}
}
_SENT: dict[int | str, dict[str, Any]] = {
    202: {"model": JobAnswer, "description": "The job was received."},
    409: {
        "model": Fault,
        "description": "The client, or all clients together, have as many jobs as they may. With the field"
        " `Idempotency-Key`: a job with this key is being received.",
    },
    415: {"model": Fault, "description": "The body is neither JSON lines nor parquet."},
    507: {"model": Fault, "description": "The folder of jobs cannot be written."},
}


class ResultsQuery(BaseModel):
    """Which results are read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    offset: int = Field(0, ge=0, description="bytes of the results that were read before")
    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S, description="seconds to wait when there is no result yet")


def add_jobs(app: FastAPI, jobs: Jobs, enter: Callable[[], None], requests: dict[str, Any]) -> None:
    """Add the calls. `enter` raises when the service drains; `requests` is the schema of the lines of a job."""
    body = {"content": {_LINES: {"schema": requests}, _PARQUET: {"schema": {"type": "string", "format": "binary"}}}}
    key = {"name": "Idempotency-Key", "in": "header", "required": False, "schema": _KEY_SCHEMA}
    sending = {"requestBody": {"required": True, **body}, "parameters": [*_parameters(JobOptions), key]}
    closed: dict[int | str, dict[str, Any]] = {status: FAULTS[status] for status in (401, 403)}
    known = closed | _UNKNOWN
    sent = closed | {status: FAULTS[status] for status in (408, 422, 429, 503)} | _SENT

    @app.post("/v1/jobs", status_code=202, response_model=JobAnswer, responses=sent, openapi_extra=sending)
    async def submit_job(request: Request) -> Response:
        """Send many submissions at once: JSON lines or parquet, one submission a line or row."""
        enter()
        options = _query(JobOptions, request)
        form = JobBody(stored_parts(request), _is_parquet(request.headers.get("content-type", "")))
        answer = await jobs.submit(current_caller(), options, form, _idempotency_key(request))
        return _answered(answer, 202)

    @app.get("/v1/jobs", response_model=JobsAnswer, responses=closed)
    async def get_jobs() -> Response:
        """The client's jobs, the newest first."""
        return _answered(JobsAnswer(jobs=jobs.states(current_caller().client)))

    @app.get("/v1/jobs/{job_id}", response_model=JobAnswer, responses=known)
    async def get_job(job_id: str) -> Response:
        """The state of a job."""
        return _answered(jobs.state(current_caller().client, job_id))

    reading = {"parameters": [_JOB_ID, *_parameters(ResultsQuery)]}

    results = {200: {"description": "One JSON line a result.", "content": {_LINES: {"schema": {"type": "string"}}}}}
    read = known | results | {422: FAULTS[422]}

    @app.get("/v1/jobs/{job_id}/results", response_class=Response, responses=read, openapi_extra=reading)
    async def get_results(request: Request, job_id: str) -> Response:
        """The results from byte `offset` to the newest: one JSON line each, in order of completion."""
        query = _query(ResultsQuery, request)
        parts = await jobs.results(current_caller().client, job_id, query.offset, query.wait_s)
        return StreamingResponse(parts, media_type=_LINES)

    @app.delete("/v1/jobs/{job_id}", response_model=JobAnswer, responses=known)
    async def delete_job(job_id: str) -> Response:
        """Stop a job and remove it with its results. Answers its last state."""
        return _answered(await jobs.delete(current_caller().client, job_id))

    _refuse_others(app, "/v1/jobs", "GET, POST")
    _refuse_others(app, "/v1/jobs/{job_id}", "DELETE, GET")


def _refuse_others(app: FastAPI, path: str, allowed: str) -> None:
    """A 405 that names all methods of a path; that of the framework names those of its first route."""

    @app.api_route(path, methods=["PUT", "PATCH", "OPTIONS", "TRACE", "HEAD"], include_in_schema=False)
    async def refuse() -> Response:
        """Not a call of jobs."""
        return fault(405, "Method Not Allowed", None, Allow=allowed)


_JOB_ID = {"name": "job_id", "in": "path", "required": True, "schema": {"type": "string"}}
_KEY_SCHEMA = {"type": "string", "minLength": 1, "maxLength": _MAX_KEY_CHARS}


def _answered(answer: BaseModel, status: int = 200) -> Response:
    return Response(answer.model_dump_json(), status, media_type=_JSON)


def _parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """The fields of a model as parameters of the URL, for the OpenAPI document."""
    properties = model.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


def _query(model: type[Query], request: Request) -> Query:
    """The parameters of the URL. Raises InvalidSubmission naming the invalid one."""
    given = request.query_params.multi_items()
    if len({name for name, _ in given}) < len(given):
        raise InvalidSubmission("body", "a parameter of the URL is given twice")
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        raise InvalidSubmission(*first_fault(error)) from None


def _is_parquet(content_type: str) -> bool:
    """Raises UnknownForm."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _PARQUET:
        return True
    if kind in ("", _LINES, _JSON, "application/jsonl", "text/plain", "application/x-www-form-urlencoded"):
        return False
    raise UnknownForm(f"content-type {kind:.80}: send {_LINES} or {_PARQUET}")


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _MAX_KEY_CHARS:
        raise InvalidSubmission("Idempotency-Key", f"must have 1 to {_MAX_KEY_CHARS} characters")
    return key
