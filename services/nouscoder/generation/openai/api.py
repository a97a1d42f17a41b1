"""The routes of the API, who may use them, and the start of the API in the worker's event loop.

    POST /v1/chat/completions, /v1/completions    whole, or as server-sent events with "stream": true
    POST /v1/sessions, /v1/sessions/ID/reward     agents make rollouts (agents.py)
    GET  /v1/models                               the policy in use
    GET  /healthz, /readyz                        the process is alive; a policy is in use

The model is NAME, or NAME@VERSION for a client that wants no other policy version.

INVARIANT: no request to a path outside `OPEN` reaches the API without a valid token, when tokens are configured.
Without tokens no request that a browser sends for a foreign site does (http_server/foreign_sites.py). A body is read
within the memory budget (http_server/memory_budget.py) and its time limit. At most `max_requests` are sampled at a
time, shared by clients (shares.py). Each request outside `OPEN` is counted once, when it ends in any way. One whose
client hung up before the status has 499.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
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
from nouscoder.domain.prompt import PromptSettings
from nouscoder.generation.engines import open_engine
from nouscoder.generation.engines.base import Engine, EngineError, EngineStopped, EngineUnusable
from nouscoder.generation.environments.agent import AgentSessions
from nouscoder.generation.metrics import ApiMetrics, ApiRoute, GenerationMetrics
from nouscoder.generation.openai.agents import KEY_BEGIN, Agents, AgentSession
from nouscoder.generation.openai.completions import Completions, PreparedRequest, PromptEncoder, Serving, event
from nouscoder.generation.openai.sampling import ApiSampler
from nouscoder.generation.openai.schema import ApiFault, ChatRequest, CompletionRequest, busy, parsed
from nouscoder.generation.weights.policies import Policies
from nouscoder.http_server.api_keys import ApiKeys, client_of
from nouscoder.http_server.body import NOT_DECODED, BodyFault, coding_of, read_body, while_connected
from nouscoder.http_server.fair_queue import QueueFull
from nouscoder.http_server.foreign_sites import foreign_part
from nouscoder.http_server.listener import http_context, listen, serve_http
from nouscoder.http_server.memory_budget import CLIENT_KEY, CountMemory, MemoryBudget, Refusals
from nouscoder.policy_folder.inspection import context_tokens
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer
from nouscoder.policy_folder.weights_files import shards_of

log = logging.getLogger(__name__)

OPEN = frozenset({"/healthz", "/readyz"})
_ROUTES = {route.value for route in ApiRoute}
_RETRY_AFTER_S = "1"
_BODIES_IN_BUDGET = 32  # the memory budget, in largest bodies
_SESSION = "nouscoder.session"  # of the agent whose key the request has
_NO_AGENTS = "there are no sessions of agents: generation.environment.kind is not agent"


@dataclass(frozen=True, slots=True)
class ApiGate:
    """ASGI middleware around `app`: admits and counts requests. `hosts`: public names of a service without tokens."""

    app: ASGIApp
    api_keys: ApiKeys
    hosts: frozenset[str]
    counts: ApiMetrics
    agents: Agents | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        started_s = time.monotonic()
        status = 499

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, answer)
        except Exception:
            status = 500 if status == 499 else status
            raise
        finally:
            route = scope["path"] if scope["path"] in _ROUTES else ApiRoute.OTHER.value
            self.counts.count_request(route, str(status), time.monotonic() - started_s)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in scope["headers"]}
        try:
            kind, _, secret = headers.get(b"authorization", "").partition(" ")
            secret = secret.strip() if kind.lower() == "bearer" else ""
            session = None
            if self.agents is not None and secret.startswith(KEY_BEGIN):
                session = self.agents.session_of(secret)
            client = self._client(scope, headers, secret, session)
            if coding := coding_of(scope):
                raise ApiFault(415, f"Content-Encoding: {coding!r} {NOT_DECODED}", "Content-Encoding")
        except ApiFault as fault:
            await response(fault)(scope, receive, send)
            return
        await self.app({**scope, CLIENT_KEY: client, _SESSION: session}, receive, send)

    def _client(self, scope: Scope, headers: dict[bytes, str], secret: str, session: AgentSession | None) -> str:
        """Whose request it is. Raises ApiFault when it is not admitted."""
        if not self.api_keys.is_open:
            if session is not None:
                return session.client
            key = self.api_keys.find(secret) if secret else None
            if key is None:
                message = "a valid token is required: Authorization: Bearer TOKEN"
                raise ApiFault(401, message, code="invalid_api_key")
            return key.client
        foreign = foreign_part(headers.get(b"host"), headers.get(b"origin"), self.hosts)
        if foreign is not None:
            message = (
                f"{foreign}: a service without tokens takes no request from another site; name the site in"
                " generation.openai.hosts, or use tokens"
            )
            raise ApiFault(403, message, code="foreign_site")
        return client_of(scope.get("client"))


def response(fault: ApiFault) -> JSONResponse:
    """The answer to a request that is refused."""
    headers = {"www-authenticate": "Bearer"} if fault.status == 401 else {}
    if fault.status in (429, 503):
        headers["retry-after"] = _RETRY_AFTER_S
    return JSONResponse(fault.record, fault.status, headers=headers)


_REFUSALS = Refusals(
    lambda message: json.dumps(busy(message).record).encode(), lambda _, message: event(busy(message).record)
)


def make_app(completions: Completions, max_body_bytes: int, agents: Agents | None = None) -> FastAPI:
    """The API, for any caller; ApiGate admits callers."""
    # A redirect to the path without a slash would repeat the Host of the request.
    app = FastAPI(
        title="NousCoder generation", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_faults(app)

    async def answered(request: Request, read: Callable[[bytes, str], Awaitable[PreparedRequest]]) -> Response:
        body = await read_body(request, max_body_bytes)
        prepared = await while_connected(request.receive, read(body, request.scope[CLIENT_KEY]))
        del body
        if not prepared.is_stream:
            whole = await while_connected(request.receive, completions.whole(prepared))
            return Response(whole, media_type="application/json")
        events = completions.events(prepared)
        # Awaited before the status is sent, so that a refusal has its own status.
        first = await while_connected(request.receive, anext(events))
        return StreamingResponse(_chain(first, events), media_type="text/event-stream")

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """A completion of a conversation, or the next turn of an agent's."""
        session = request.scope[_SESSION]
        if session is None or agents is None:
            return await answered(request, completions.of_chat)
        body = await read_body(request, max_body_bytes)
        whole, media_type = await while_connected(request.receive, agents.chat(session, body))
        return Response(whole, media_type=media_type)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        """A completion of a text."""
        if request.scope[_SESSION] is not None:
            raise ApiFault(400, "a session takes chat completions only: the texts of a rollout are messages")
        return await answered(request, completions.of_text)

    _add_sessions(app, max_body_bytes, agents)

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


def _add_sessions(app: FastAPI, max_body_bytes: int, agents: Agents | None) -> None:
    @app.post("/v1/sessions", status_code=201)
    async def claim_session(request: Request) -> dict[str, Any]:
        """A rollout for an agent to make."""
        if agents is None:
            raise ApiFault(404, _NO_AGENTS)
        body = await read_body(request, max_body_bytes)
        return await while_connected(request.receive, agents.claim(body, request.scope[CLIENT_KEY]))

    @app.post("/v1/sessions/{session_id}/reward")
    async def close_session(session_id: str, request: Request) -> dict[str, Any]:
        """The agent has made its rollout."""
        if agents is None:
            raise ApiFault(404, _NO_AGENTS)
        body = await read_body(request, max_body_bytes)
        return await agents.close(request.scope[_SESSION], session_id, body)


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events; an error after the first is the last event, because the status has been sent."""
    async with aclosing(rest) as events:  # type: ignore[type-var]
        yield first
        try:
            async for each in events:
                yield each
        except (ApiFault, EngineError, QueueFull) as error:
            yield event(_fault_of(error).record)


def _fault_of(error: Exception) -> ApiFault:
    """The refusal for an error of a request that was admitted."""
    match error:
        case ApiFault():
            return error
        case BodyFault():
            return ApiFault(error.status, f"body: {error}")
        case QueueFull():
            return busy(str(error))
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

    for kind in (ApiFault, EngineError, BodyFault, QueueFull, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, refused)


async def start_openai(
    config: Config,
    folder: Path,
    engine: Engine,
    policies: Policies,
    counts: ApiMetrics,
    stack: AsyncExitStack,
    sessions: AgentSessions | None = None,
) -> str:
    """Serve until `stack` closes; `sessions` are those of agents, if any. Returns the address in use.

    Raises AddressError, ApiKeysUnusable, Unusable and EngineUnusable.
    """
    settings, environment = config.generation.openai, config.generation.environment
    keys = ApiKeys(Path(settings.tokens_file) if settings.tokens_file else None)
    if keys.is_open:
        log.warning("no tokens are configured: anyone who can reach this address may sample")
    listening = listen(settings.http)
    stack.callback(listening.close)
    try:
        # Two, because a tokenizer is not safe in two threads: prompts are encoded beside the event loop.
        encoder, decoder = [await asyncio.to_thread(load_tokenizer, folder, environment.date) for _ in range(2)]
        stop_ids = await asyncio.to_thread(lambda: decoder.stop_ids)  # it may wait for the chat template
    except TokenizerError as error:
        raise EngineUnusable(f"generation.openai: {error}") from error
    most = config.generation.max_tokens_total
    capacity = min(most, context_tokens(folder) or most)
    prompts = PromptEncoder(encoder, capacity, PromptSettings(thinking=environment.thinking).enable_thinking)
    sampler = ApiSampler(engine, decoder.decode, stop_ids, settings.slots)
    name = settings.model or config.run.name
    serving = Serving(name, prompts, decoder.decode, stop_ids, settings.request_limit_s, counts)
    agents = None if sessions is None else Agents(sessions, serving)
    app = make_app(Completions(serving, policies, sampler, settings.max_requests), settings.max_body_bytes, agents)
    budget = MemoryBudget(_BODIES_IN_BUDGET * settings.max_body_bytes)
    app.add_middleware(CountMemory, budget=budget, is_open_path=OPEN.__contains__, refusals=_REFUSALS)
    hosts = frozenset(host.lower() for host in settings.hosts)
    app.add_middleware(ApiGate, keys, hosts, counts, agents)
    await serve_http(app, listening, stack, http_context(settings.tls))
    address = f"{settings.http.rpartition(':')[0]}:{listening.getsockname()[1]}"
    log.info("listening", extra={"openai": address})
    return address


@asynccontextmanager
async def serving_folder(config: Config, folder: Path) -> AsyncIterator[str]:
    """Serve the policy in `folder` as version 0, for an evaluation. Gives the address in use.

    Raises EngineUnusable, PolicyUnusable, WeightsMissing and AddressError.
    """
    async with AsyncExitStack() as stack:
        metrics = GenerationMetrics()
        opened = await asyncio.to_thread(open_engine, config, folder, metrics)
        engine = await stack.enter_async_context(opened)
        policies = Policies(engine)
        shards = await asyncio.to_thread(shards_of, folder)
        await policies.update(PolicyManifest(0, 0, str(folder), shards))
        yield await start_openai(config, folder, engine, policies, metrics.api, stack)


async def longest_prompt(folder: Path, requests: Iterable[dict[str, Any]], date: str = "") -> int:
    """The most tokens that the prompt of one of these requests has. Raises EngineUnusable and ApiFault."""
    try:
        encoder = PromptEncoder(await asyncio.to_thread(load_tokenizer, folder, date), sys.maxsize)
    except TokenizerError as error:
        raise EngineUnusable(str(error)) from error
    longest = 0
    for request in requests:
        body = json.dumps(request).encode()
        if "messages" in request:
            prompts = [await encoder.of_chat(parsed(ChatRequest, body), "")]
        else:
            prompts = await encoder.of_completion(parsed(CompletionRequest, body), "")
        longest = max(longest, *map(len, prompts))
    return longest
