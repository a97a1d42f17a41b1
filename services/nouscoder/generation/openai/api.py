"""The routes of the API. Each reads the body, samples, and sends the answer.

    POST /v1/chat/completions, /v1/completions    whole, or as server-sent events with "stream": true
    GET  /v1/models                               the policy in use
    GET  /healthz, /readyz                        the process is alive; a policy is in use

The model is NAME, or NAME@VERSION for a client that wants no other policy version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nouscoder import __version__
from nouscoder.generation.engines.base import EngineError, EngineStopped
from nouscoder.generation.openai.completions import Asked, Completions, event
from nouscoder.generation.openai.faults import SERVER, ApiFault, unavailable
from nouscoder.generation.openai.gate import response
from nouscoder.http_server.body import BodyFault, read_body, while_connected


def make_app(completions: Completions, max_body_bytes: int) -> FastAPI:
    """The API, for any caller; gate.py admits callers."""
    # A redirect to the path without a slash would repeat the Host of the request.
    app = FastAPI(
        title="NousCoder generation", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_faults(app)
    _add_pages(app, completions)

    async def answered(request: Request, read: Callable[[bytes], Awaitable[Asked]]) -> Response:
        asked = await read(await read_body(request, max_body_bytes))
        if not asked.is_stream:
            return JSONResponse(await while_connected(request.receive, completions.whole(asked)))
        events = completions.events(asked)
        # Awaited before the status is sent, so that a refusal has its own status.
        first = await while_connected(request.receive, anext(events))
        return StreamingResponse(_chain(first, events), media_type="text/event-stream")

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """A completion of a conversation."""
        return await answered(request, completions.of_chat)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        """A completion of a text."""
        return await answered(request, completions.of_text)

    return app


def _add_pages(app: FastAPI, completions: Completions) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The policy in use, by its name alone and with its version."""
        entries = [
            {"id": name, "object": "model", "created": 0, "owned_by": "nouscoder"} for name in completions.models
        ]
        return {"object": "list", "data": entries}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """A policy is in use."""
        return {"status": f"ready with policy version {completions.policy_version}"}


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events; an error after the first is the last event, because the status has been sent."""
    async with aclosing(rest) as events:  # type: ignore[type-var]
        yield first
        try:
            async for each in events:
                yield each
        except (ApiFault, EngineError) as error:
            yield event(_fault_of(error).record())


def _fault_of(error: ApiFault | EngineError | BodyFault) -> ApiFault:
    if isinstance(error, ApiFault):
        return error
    if isinstance(error, BodyFault):
        return ApiFault(error.status, f"body: {error}")
    if isinstance(error, EngineStopped):
        return unavailable(str(error), "engine_stopped")
    return ApiFault(500, str(error), code="engine_error", kind=SERVER)


def _add_faults(app: FastAPI) -> None:
    """Map every exception to an answer in OpenAI's form."""

    async def known(_: Request, error: Any) -> Response:
        return response(_fault_of(error))

    async def gone(_: Request, error: Exception) -> Response:
        return response(ApiFault(499, "the client disconnected"))

    async def of_http(_: Request, error: Any) -> Response:
        return response(ApiFault(error.status_code, str(error.detail)))

    for kind in (ApiFault, EngineError, BodyFault):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, of_http)  # no such path or method
