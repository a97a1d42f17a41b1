"""The REST API. Handlers convert, call the grader and convert. Every graded submission gets status 200.

POST /v1/grade does without the web framework, whose layers cost more than the parsing of a submission.

INVARIANT: once `DrainState.draining` is set, no submission is accepted (503), and those in progress get their verdict.
A request to POST /v1/grade passes the same checks as any other (`GradingApi.wrap`). Its answers and faults are those of
the route that the OpenAPI document describes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.types import ASGIApp, Receive, Scope, Send

from nouscoder import __version__
from nouscoder.domain.submission import Comparator
from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.body import BODIES_OF_MANY, read_body, read_whole, while_connected
from nouscoder.http_server.memory_budget import CountMemory, MemoryBudget
from nouscoder.verifier.access.gatekeeper import REFUSALS, Gatekeeper, is_open_path
from nouscoder.verifier.access.stored_tests import ClientTests
from nouscoder.verifier.api.capabilities import Capabilities, CapabilitiesAnswer
from nouscoder.verifier.api.faults import FAULTS, Absent, Draining, add_faults, answer_to, fault
from nouscoder.verifier.api.jobs import add_jobs
from nouscoder.verifier.api.openapi import openapi_document
from nouscoder.verifier.api.pages import docs_page, docs_parts, highlighter, highlighter_path, playground
from nouscoder.verifier.api.remote_rewards import add_get_reward
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.api.sandbox_fusion import add_run_code, add_submit
from nouscoder.verifier.api.schema import (
    Fault,
    GradeAnswer,
    StoredTestsAnswer,
    answer_json,
    bodies,
    body_of,
    parse_submission,
)
from nouscoder.verifier.api.streaming import batch_lines, lines_of, server_events
from nouscoder.verifier.api.tests_upload import TestsUpload
from nouscoder.verifier.grading.grader import Grading
from nouscoder.verifier.jobs.service import Jobs
from nouscoder.verifier.judges import mathematics
from nouscoder.verifier.judges.users_comparators import published_comparators
from nouscoder.verifier.toolchains.languages import installed

# POST /v1/grade without the web framework.

PATH = "/v1/grade"


class GradingApi(FastAPI):
    """The API. Requests to POST /v1/grade go to `_front`, all others to the routes."""

    def __init__(self, grader: Grading, enter: Callable[[], None], max_body_bytes: int, **settings: Any) -> None:
        """`enter` raises when the service drains."""
        super().__init__(**settings)
        self._grader = grader
        self._enter = enter
        self._max_body_bytes = max_body_bytes
        self._wrapped_front: ASGIApp = self._front

    async def _front(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Grade the body of a request."""
        try:
            body = await self.graded(scope, receive)
        except Exception as error:
            answer = answer_to(error)
            if answer is None:
                raise
            await answer(scope, receive, send)
            return
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def graded(self, scope: Scope, receive: Receive) -> bytes:
        """The JSON of the verdict on the body of a request. Raises the errors of `answer_to`."""
        self._enter()
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        body = await read_whole(declared.decode("latin-1"), receive, self._max_body_bytes)
        submission = await bodies.parsed(body, parse_submission)
        return answer_json(await while_connected(receive, self._grader.grade(submission)))

    def wrap(self, middleware: Callable[..., ASGIApp], **options: Any) -> None:
        """Add a middleware in front of all others."""
        self.add_middleware(middleware, **options)
        self._wrapped_front = middleware(self._wrapped_front, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST":
            await self._wrapped_front(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


SILENCE_S = 30.0  # of an event loop that hangs
_BEAT_S = 1.0
_JSON = "application/json"
_EITHER = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("GradeRequest", "StoredGradeRequest")]}
_REQUEST = body_of(_EITHER)
_REQUESTS = {"type": "array", "items": _EITHER, "description": "one a line"}
_LINES = {"requestBody": {"required": True, "content": {"application/x-ndjson": {"schema": _REQUESTS}}}}


@dataclass(slots=True)
class DrainState:
    """Whether the service drains: it then refuses new submissions. And whether its event loop turns."""

    draining: bool = False
    _turned_s: float | None = None

    def start(self) -> None:
        """Refuse new submissions from now on."""
        self.draining = True

    def beat(self) -> None:
        """Note from now on that this event loop turns, for health checks that another one answers."""
        self._turned_s = time.monotonic()
        asyncio.get_running_loop().call_later(_BEAT_S, self.beat)

    @property
    def hangs(self) -> bool:
        """Whether the event loop that began to `beat` has not turned for SILENCE_S."""
        return self._turned_s is not None and time.monotonic() - self._turned_s > SILENCE_S

    def enter(self) -> None:
        """Called at the begin of a submission. Raises Draining."""
        if self.draining:
            raise Draining


def make_app(
    grader: Grading,
    registry: CollectorRegistry,
    drain_state: DrainState,
    max_body_bytes: int,
    api_keys: ApiKeys | None = None,
    runner: CodeRunner | None = None,
    client_tests: ClientTests | None = None,
    budget: MemoryBudget | None = None,
    hosts: Collection[str] = (),
    capabilities: Capabilities | None = None,
    jobs: Jobs | None = None,
) -> GradingApi:
    """The API of `grader`. Without `api_keys` every request is admitted; `hosts` are then the service's public names.

    `budget` bounds the bodies and answers of all requests in progress. /run_code exists only with a `runner`, /v1/tests
    only with `client_tests`, /v1/capabilities only with `capabilities`, and /v1/jobs answers 501 without `jobs`.
    """
    # A redirect to the path without a slash would repeat the Host of the request.
    app = GradingApi(
        grader,
        drain_state.enter,
        max_body_bytes,
        title="NousCoder verifier",
        version=__version__,
        openapi_url=None,  # served by _add_docs
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    if budget is not None:
        app.wrap(CountMemory, budget=budget, is_open_path=is_open_path, refusals=REFUSALS)
    keys = api_keys or ApiKeys()
    app.wrap(Gatekeeper, api_keys=keys, hosts=hosts)
    add_faults(app)
    _add_pages(app, registry, drain_state)

    of_many = BODIES_OF_MANY * max_body_bytes
    of_batch = of_many if budget is None else min(of_many, budget.budget_bytes)
    _add_grading(app, grader, drain_state, max_body_bytes, of_batch)
    add_get_reward(app, grader, drain_state.enter, max_body_bytes)
    add_submit(app, grader, drain_state.enter, max_body_bytes)
    if runner is not None:
        add_run_code(app, runner, drain_state.enter, max_body_bytes)
    if client_tests is not None:
        _add_tests(app, client_tests, drain_state, max_body_bytes)
    if capabilities is not None:
        _add_capabilities(app, capabilities)
    if jobs is not None:
        add_jobs(app, jobs, drain_state.enter, _REQUESTS)
    else:
        _add_no_jobs(app)
    _add_docs(app)
    app.openapi = functools.cache(  # type: ignore[method-assign]
        lambda: openapi_document(app, tuple(installed()), needs_token=not keys.is_open)
    )
    return app


def _add_grading(
    app: GradingApi, grader: Grading, drain_state: DrainState, max_body_bytes: int, max_batch_bytes: int
) -> None:
    @app.post("/v1/grade", response_model=GradeAnswer, responses=FAULTS, openapi_extra=_REQUEST)
    async def grade(request: Request) -> Response:
        """Grade one submission."""
        return Response(await app.graded(request.scope, request.receive), media_type=_JSON)

    @app.post("/v1/grade/stream", responses=FAULTS, openapi_extra=_REQUEST)
    async def grade_stream(request: Request) -> Response:
        """Grade one submission: an event `outcome` for each test as it ends, then one event `verdict`."""
        drain_state.enter()
        submission = await bodies.parsed(await read_body(request, max_body_bytes), parse_submission)
        events = server_events(grader, submission)
        first = await anext(events)  # awaited before the status is sent, so that a refusal has its own status
        return StreamingResponse(_chain(first, events), media_type="text/event-stream")

    @app.post("/v1/grade/batch", responses=FAULTS, openapi_extra=_LINES)
    async def grade_batch(request: Request) -> Response:
        """Grade many: one request per line with an optional `id`. One answer per line, in order of completion."""
        drain_state.enter()
        # The body is read completely before the first answer, so that a client may write all before it reads.
        body = await read_body(request, max_batch_bytes)
        return StreamingResponse(batch_lines(grader, lines_of(body)), media_type="application/x-ndjson")


def _add_tests(app: FastAPI, client_tests: ClientTests, drain_state: DrainState, max_body_bytes: int) -> None:
    upload = TestsUpload(client_tests, max_body_bytes)
    described = body_of("Tests")
    full: dict[int | str, dict[str, Any]] = {
        409: {
            "model": Fault,
            "description": "The client, or all clients together, have stored the maximum number of bytes of tests.",
        }
    }

    @app.put("/v1/tests", response_model=StoredTestsAnswer, responses=FAULTS | full, openapi_extra=described)
    async def put_tests(request: Request) -> Response:
        """Store tests of any size. Submissions of the same client can then name them by their digest."""
        drain_state.enter()
        stored = await upload.put(request)
        answer = StoredTestsAnswer(digest=stored.digest, num_tests=stored.num_tests, num_bytes=stored.num_bytes)
        return Response(answer.model_dump_json(), media_type=_JSON)


def _add_capabilities(app: FastAPI, capabilities: Capabilities) -> None:
    @app.get("/v1/capabilities", response_model=CapabilitiesAnswer, responses={401: FAULTS[401], 403: FAULTS[403]})
    async def get_capabilities() -> Response:
        """Languages, libraries, limits and isolation of this service."""
        return Response((await capabilities.answer()).model_dump_json(), media_type=_JSON)


def _add_no_jobs(app: FastAPI) -> None:
    @app.api_route("/v1/jobs{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def no_jobs() -> Response:
        """Says what turns jobs on."""
        raise Absent("this service keeps no jobs: verifier.jobs.folder is empty")


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part


def make_health_app(drain_state: DrainState) -> FastAPI:
    """Only /healthz and /readyz, for probes without API key or certificate."""
    app = FastAPI(title="NousCoder verifier health", version=__version__, docs_url=None, redoc_url=None)
    add_faults(app)
    _add_health(app, drain_state)
    return app


def _add_health(app: FastAPI, drain_state: DrainState) -> None:
    @app.get("/healthz", responses={503: {"model": Fault}})
    async def healthz() -> Any:
        """The process is alive."""
        return fault(503, "the event loop does not turn") if drain_state.hangs else {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": Fault}})
    async def readyz() -> dict[str, str]:
        """The service accepts submissions."""
        drain_state.enter()
        return {"status": "ready"}


def _add_pages(app: FastAPI, registry: CollectorRegistry, drain_state: DrainState) -> None:
    _add_health(app, drain_state)
    kinds = published_comparators()
    kinds.sort(key=lambda kind: kind != Comparator().kind)  # the default is first
    page = playground(installed(), kinds, () if mathematics.is_installed() else ("math",))
    colors = highlighter()
    # Bytes, so that all who read a page share its memory: these answers are not counted (CountMemory).
    page_body, colors_body = page.text.encode(), colors.text.encode()

    @app.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        """The playground page."""
        return HTMLResponse(page_body, headers=page.headers)

    @app.get(highlighter_path(), response_class=Response, include_in_schema=False)
    async def highlight() -> Response:
        """The highlighter of the playground."""
        return Response(colors_body, media_type="text/javascript", headers=colors.headers)

    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """The Prometheus metrics; those in the format OpenMetrics have exemplars."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(await asyncio.to_thread(encode, registry), headers={"content-type": content_type})


def _add_docs(app: FastAPI) -> None:
    @functools.cache
    def document() -> bytes:
        return json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    page, parts = docs_page(f"{app.title} {app.version}"), docs_parts()
    page_body = page.text.encode()

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """The OpenAPI document."""
        return Response(document(), media_type=_JSON)

    @app.get("/docs", response_class=HTMLResponse)
    async def docs() -> Response:
        """The OpenAPI document as a page."""
        return HTMLResponse(page_body, headers=page.headers)

    async def part(request: Request) -> Response:
        """A script or a style sheet of that page."""
        body, kind, headers = parts[request.url.path]
        return Response(body, media_type=kind, headers=headers)

    for path in parts:
        app.add_api_route(path, part, response_class=Response, include_in_schema=False)
