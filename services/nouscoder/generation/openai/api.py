"""The routes of the API, who may use them, and the start of the API: beside an engine, or with one of its own.

    POST /v1/chat/completions, /v1/completions    whole, or as server-sent events with "stream": true
    GET  /v1/models                               the policy in use
    GET  /healthz, /readyz                        the process is alive; a policy is in use

The model is NAME, or NAME@VERSION for a client that wants no other policy version.

INVARIANT: no request to a path outside `OPEN` reaches the API without a valid token, when tokens are configured.
Without tokens no request that a browser sends for a foreign site does (http_server/api_keys.py). At most
`max_requests` requests are in progress, from before their body is read until the last byte of their answer; a client
that takes nothing of its answer is given up (http_server/listener.py). Each request outside `OPEN` is counted once,
when it ends in any way. One whose client hung up before the status has 499.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nouscoder import __version__
from nouscoder.config import Config
from nouscoder.domain.policy import PolicyManifest
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import Engine, EngineError, EngineStopped, EngineUnusable
from nouscoder.generation.metrics import ApiMetrics, ApiRoute, GenerationMetrics
from nouscoder.generation.openai.completions import Completions, PreparedRequest, PromptEncoder, event
from nouscoder.generation.openai.sampling import ApiSampler
from nouscoder.generation.openai.schema import ApiFault, ChatRequest, parsed
from nouscoder.generation.weights.policies import Policies
from nouscoder.http_server.api_keys import ApiKeys, foreign_part
from nouscoder.http_server.body import BodyFault, read_body, while_connected
from nouscoder.http_server.listener import http_context, start_http
from nouscoder.policy_folder.inspection import context_tokens
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer
from nouscoder.policy_folder.weights_files import shards_of

log = logging.getLogger(__name__)

OPEN = frozenset({"/healthz", "/readyz"})
_ROUTES = {route.value for route in ApiRoute}
_RETRY_AFTER_S = "1"


class ApiGate:
    """ASGI middleware around `app`: admits and counts requests. `hosts`: public names of a service without tokens."""

    def __init__(
        self, app: ASGIApp, api_keys: ApiKeys, hosts: Collection[str], max_requests: int, metrics: ApiMetrics
    ) -> None:
        self._app = app
        self._api_keys = api_keys
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_requests = max_requests
        self._metrics = metrics
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        status, started_s = 499, time.monotonic()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        headers = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in scope["headers"]}
        fault = self._fault(headers)
        self._num_requests += fault is None
        try:
            await (self._app if fault is None else response(fault))(scope, receive, noted)
        except Exception:
            status = 500 if status == 499 else status
            raise
        finally:
            self._num_requests -= fault is None
            route = scope["path"] if scope["path"] in _ROUTES else ApiRoute.OTHER.value
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - started_s)

    def _fault(self, headers: dict[bytes, str]) -> ApiFault | None:
        """Why a request with these headers is not admitted."""
        if self._api_keys.is_open:
            foreign = foreign_part(headers.get(b"host"), headers.get(b"origin"), self._hosts)
            if foreign is not None:
                message = (
                    f"{foreign}: a service without tokens takes no request from another site; name the site in"
                    " generation.openai.hosts, or use tokens"
                )
                return ApiFault(403, message, code="foreign_site")
        elif not self._is_known(headers.get(b"authorization", "")):
            return ApiFault(401, "a valid token is required: Authorization: Bearer TOKEN", code="invalid_api_key")
        if self._num_requests >= self._max_requests:
            message = f"{self._num_requests} requests are in progress, the most that are taken; retry later"
            return ApiFault(429, message, code="rate_limit_exceeded", kind="rate_limit_error")
        return None

    def _is_known(self, authorization: str) -> bool:
        kind, _, secret = authorization.partition(" ")
        return kind.lower() == "bearer" and self._api_keys.find(secret.strip()) is not None


def response(fault: ApiFault) -> JSONResponse:
    """The answer to a request that is refused."""
    headers = {"www-authenticate": "Bearer"} if fault.status == 401 else {}
    if fault.status in (429, 503):
        headers["retry-after"] = _RETRY_AFTER_S
    return JSONResponse(fault.record, fault.status, headers=headers)


def make_app(completions: Completions, max_body_bytes: int) -> FastAPI:
    """The API, for any caller; ApiGate admits callers."""
    # A redirect to the path without a slash would repeat the Host of the request.
    app = FastAPI(
        title="NousCoder generation", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_faults(app)

    async def answered(request: Request, read: Callable[[bytes], Awaitable[PreparedRequest]]) -> Response:
        prepared = await read(await read_body(request, max_body_bytes))
        if not prepared.is_stream:
            return JSONResponse(await while_connected(request.receive, completions.whole(prepared)))
        events = completions.events(prepared)
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

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The policy in use, by its name alone and with its version."""
        about = {"object": "model", "created": 0, "owned_by": "nouscoder"}
        return {"object": "list", "data": [{"id": name, **about} for name in completions.models]}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """A policy is in use."""
        return {"status": f"ready with policy version {completions.policy_version}"}

    return app


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events; an error after the first is the last event, because the status has been sent."""
    async with aclosing(rest) as events:  # type: ignore[type-var]
        yield first
        try:
            async for each in events:
                yield each
        except (ApiFault, EngineError) as error:
            yield event(_fault_of(error).record)


def _fault_of(error: Exception) -> ApiFault:
    """The refusal for an error of a request that was admitted."""
    match error:
        case ApiFault():
            return error
        case BodyFault():
            return ApiFault(error.status, f"body: {error}")
        case EngineStopped():
            return ApiFault(503, str(error), code="engine_stopped")
        case EngineError():
            return ApiFault(500, str(error), code="engine_error")
        case HTTPException():  # no such path or method
            return ApiFault(error.status_code, str(error.detail))
        case _:
            return ApiFault(499, "the client disconnected")


def _add_faults(app: FastAPI) -> None:
    """Map every expected exception to an answer in OpenAI's form."""

    async def refused(_: Request, error: Exception) -> Response:
        return response(_fault_of(error))

    for kind in (ApiFault, EngineError, BodyFault, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, refused)


async def start_openai(
    config: Config, folder: Path, engine: Engine, policies: Policies, metrics: ApiMetrics, stack: AsyncExitStack
) -> str:
    """Listen until `stack` closes. Returns the address in use.

    Raises AddressError, ApiKeysUnusable, TlsUnusable and EngineUnusable.
    """
    settings = config.generation.openai
    try:
        # Two, because a tokenizer is not safe in two threads: prompts are encoded beside the event loop.
        encoder, decoder = [await asyncio.to_thread(load_tokenizer, folder) for _ in range(2)]
    except TokenizerError as error:
        raise EngineUnusable(str(error)) from error
    api_keys = ApiKeys(Path(settings.tokens_file) if settings.tokens_file else None)
    if api_keys.is_open:
        log.warning("no tokens are configured: anyone who can reach this address may sample")
    capacity = min(config.generation.max_tokens_total, context_tokens(folder) or config.generation.max_tokens_total)
    completions = Completions(
        settings.model or config.run.name,
        policies,
        ApiSampler(engine, decoder.decode, decoder.stop_ids, settings.slots),
        PromptEncoder(encoder, capacity),
        decoder.decode,
        settings.request_limit_s,
        metrics,
    )
    app = make_app(completions, settings.max_body_bytes)
    app.add_middleware(
        ApiGate, api_keys=api_keys, hosts=settings.hosts, max_requests=settings.max_requests, metrics=metrics
    )
    address = await start_http(app, settings.http, stack, http_context(settings.tls))
    log.info("listening", extra={"openai": address})
    return address


@asynccontextmanager
async def serving_folder(config: Config, folder: Path) -> AsyncIterator[str]:
    """Serve the policy in `folder` at `config.generation.openai.http`, as version 0. Gives the address in use.

    It needs no broker, no learner and no rollouts: it is for an evaluation of the policy. Raises EngineUnusable,
    PolicyUnusable, WeightsMissing and AddressError.
    """
    async with AsyncExitStack() as stack:
        metrics = GenerationMetrics()
        opened = await asyncio.to_thread(open_engine, config, folder, metrics)
        engine = await stack.enter_async_context(opened)
        policies = Policies(engine)
        shards = await asyncio.to_thread(shards_of, folder)
        await policies.update(PolicyManifest(0, 0, str(folder), shards))
        yield await start_openai(config, folder, engine, policies, metrics.api, stack)


async def longest_prompt(folder: Path, requests: Iterable[dict[str, Any]]) -> int:
    """The most tokens that the prompt of one of these chat requests has. Raises EngineUnusable and ApiFault."""
    try:
        encoder = PromptEncoder(await asyncio.to_thread(load_tokenizer, folder), sys.maxsize)
    except TokenizerError as error:
        raise EngineUnusable(str(error)) from error
    longest = 0
    for request in requests:
        longest = max(longest, len(await encoder.of_chat(parsed(ChatRequest, json.dumps(request).encode()))))
    return longest
