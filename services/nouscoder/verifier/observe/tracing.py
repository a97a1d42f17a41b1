"""Traces of grading. Without `verifier.tracing_endpoint` nothing is traced: spans that go nowhere cost time too.

    POST /v1/grade (or the gRPC method)     a child of the caller's span, which W3C traceparent names
      grade                                 the submission and its verdict; absent for an answer from the cache
        queue                               from acceptance to the first sandbox
        sandbox                             waiting for the sandbox, and compiling; one span per sandbox
        test                                one span per test that counts: index, outcome, times

INVARIANT: no span holds source, input, output, expected output or an API key. Every span that starts also ends. While
tracing is off, neither OpenTelemetry's SDK nor its exporter is imported. An exporter that cannot reach its receiver
drops spans and delays no request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nouscoder.config import ConfigError
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import TestOutcome, Verdict
from nouscoder.errors import Unusable
from nouscoder.installation import how_to_install
from nouscoder.rpc.status_codes import rebuilt
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.grading.grader import GraderDecorator, Grading, OnOutcome
from nouscoder.verifier.observe.metrics import current_trace
from nouscoder.verifier.sandbox.base import Program, Sandbox, SandboxDecorator, Session

if TYPE_CHECKING:
    from nouscoder.verifier.api.rest import GradingApi

    _Handler = grpc.RpcMethodHandler[Any, Any]


_NS = 1_000_000_000
_EXPORT_LIMIT_S = 5.0
_SHUTDOWN_LIMIT_MS = 5000

Opened = TypeVar("Opened")

# OpenTelemetry's own context is not used: it must be reset where it was set, but the generator of a stream may be
# closed in another context. Each request has its own task, so a value that is set here needs no reset.
_parent: ContextVar[Context | None] = ContextVar("parent", default=None)
_accepted_ns: ContextVar[list[int] | None] = ContextVar("accepted", default=None)  # emptied by the first sandbox


class Tracing:
    """Starts the spans of a service."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Iterator[trace.Span]:
        """The span of a request, below the traceparent in `headers`. It is the parent of all spans of this task."""
        with self._span(name, self._propagator.extract(headers), trace.SpanKind.SERVER) as span:
            _parent.set(trace.set_span_in_context(span))
            told = span.get_span_context()
            current_trace.set(trace.format_trace_id(told.trace_id) if told.trace_flags.sampled else "")
            yield span

    @contextmanager
    def step(self, name: str, **attributes: str | int | float | bool) -> Iterator[trace.Span]:
        """The span of a part of this task's work."""
        with self._span(name, _parent.get(), trace.SpanKind.INTERNAL) as span:
            span.set_attributes(attributes)
            yield span

    def past(
        self, name: str, begun_ns: int, ended_ns: int, parent: Context | None, **attributes: str | int | float
    ) -> None:
        """A span of work that has already ended."""
        span = self._tracer.start_span(name, context=parent, start_time=begun_ns, attributes=attributes)
        span.end(end_time=ended_ns)

    @contextmanager
    def _span(self, name: str, parent: Context | None, kind: trace.SpanKind) -> Iterator[trace.Span]:
        span = self._tracer.start_span(name, context=parent if parent is not None else Context(), kind=kind)
        try:
            yield span
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            raise
        finally:
            span.end()


def open_tracing(endpoint: str, stack: AsyncExitStack) -> Tracing | None:
    """Trace to `endpoint`, over OTLP/HTTP; None when it is "". Raises Unusable and ConfigError.

    It is http(s)://host:port, with /v1/traces added unless it has a path. Closing `stack` sends the remaining spans,
    for at most a few seconds.
    """
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise Unusable(
            f"verifier.tracing_endpoint needs OpenTelemetry ({error}): {how_to_install('tracing')}"
        ) from error
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"verifier.tracing_endpoint: {endpoint!r:.80} is not an http address")
    url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    provider = TracerProvider(resource=Resource.create({"service.name": "nouscoder-verifier"}))
    exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_LIMIT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=_SHUTDOWN_LIMIT_MS))

    def close() -> None:
        provider.force_flush(_SHUTDOWN_LIMIT_MS)
        provider.shutdown()

    stack.push_async_callback(asyncio.to_thread, close)
    return Tracing(provider.get_tracer("nouscoder.verifier"))


def traced_grader(grader: Grading, tracing: Tracing | None) -> Grading:
    """The same grader, traced unless tracing is off."""
    return grader if tracing is None else TracedGrader(grader, tracing)


def traced_sandbox(sandbox: Sandbox, tracing: Tracing | None) -> Sandbox:
    """The same sandbox, traced unless tracing is off."""
    return sandbox if tracing is None else TracedSandbox(sandbox, tracing)


class TracedGrader(GraderDecorator):
    """Grades with `inner`, with a span per submission and one per test."""

    def __init__(self, inner: Grading, tracing: Tracing) -> None:
        super().__init__(inner)
        self._tracing = tracing

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """See `Grader.grade`."""
        kind = type(submission.tests).__name__
        with self._tracing.step("grade", language=submission.language, tests_type=kind) as span:
            here = trace.set_span_in_context(span)

            def record(outcome: TestOutcome) -> None:
                now_ns = time.time_ns()
                self._tracing.past(
                    "test",
                    now_ns - int(outcome.wall_time_s * _NS),
                    now_ns,
                    here,
                    index=outcome.index,
                    outcome=outcome.outcome.value,
                    wall_time_s=outcome.wall_time_s,
                    cpu_time_s=outcome.cpu_time_s,
                    memory_bytes=outcome.memory_bytes,
                )
                if on_outcome is not None:
                    on_outcome(outcome)

            parent, accepted = _parent.set(here), _accepted_ns.set([time.time_ns()])
            try:
                verdict = await self._inner.grade(submission, record)
            finally:
                _parent.reset(parent)
                _accepted_ns.reset(accepted)
            span.set_attributes({"verdict": verdict.kind.value, "passed": verdict.passed, "total": verdict.total})
            span.set_attributes({"client": current_caller().client, "backend": verdict.backend})
            return verdict


class TracedSandbox(SandboxDecorator):
    """Forwards to `inner`, with spans for the time before a submission's first test."""

    def __init__(self, inner: Sandbox, tracing: Tracing) -> None:
        super().__init__(inner)
        self._tracing = tracing

    def session(self, program: Program) -> AbstractAsyncContextManager[Session]:
        """See `Sandbox`."""
        return self._traced(self._inner.session(program), program)

    def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AbstractAsyncContextManager[tuple[Session, ...]]:
        """See `Sandbox`."""
        return self._traced(self._inner.with_partners(program, partner, checker), program)

    @asynccontextmanager
    async def _traced(self, opened: AbstractAsyncContextManager[Opened], program: Program) -> AsyncIterator[Opened]:
        """Time only the opening of the sandbox."""
        waited = _accepted_ns.get()
        if waited:
            self._tracing.past("queue", waited.pop(), time.time_ns(), _parent.get())
        async with AsyncExitStack() as stack:
            with self._tracing.step("sandbox", backend=self.name, language=program.language.name):
                entered = await stack.enter_async_context(opened)
            yield entered


# The root spans of a trace: one for each grading request of the REST API, and one for each gRPC call.

_PATHS = frozenset({"/v1/grade", "/v1/grade/stream", "/v1/grade/batch", "/run_code"})
_SERVICE = "/nouscoder.v1.VerifierService/"


def trace_fronts(app: GradingApi, tracing: Tracing | None) -> list[grpc.aio.ServerInterceptor]:
    """Trace the requests to `app`. Returns the interceptors that trace gRPC calls. Does nothing when tracing is off."""
    if tracing is None:
        return []
    app.wrap(TraceRequests, tracing=tracing)
    return [TraceCalls(tracing)]


class TraceRequests:
    """ASGI middleware. It must be the outermost one."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracing.request(f"{scope['method']} {scope['path']}", headers) as span:

            async def record(message: Message) -> None:
                if message["type"] == "http.response.start" and span.is_recording():
                    answered = {bytes(name).lower(): value for name, value in message.get("headers", ())}
                    span.set_attribute("http.response.status_code", message["status"])
                    span.set_attribute("request_id", answered.get(b"x-request-id", b"").decode("latin-1"))
                await send(message)

            await self._app(scope, receive, record)


class TraceCalls(grpc.aio.ServerInterceptor):
    """gRPC interceptor. It must be the first one. It does not trace health and reflection."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Handle one call."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(_SERVICE):
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        headers = {str(key): value for key, value in metadata if isinstance(value, str)}
        return _traced(handler, lambda: self._tracing.request(method, headers))


def _traced(handler: _Handler, begin: Callable[[], AbstractContextManager[object]]) -> _Handler:
    """The same handler, inside a span."""
    inner: Any = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream

    async def one(request: Any, context: Any) -> Any:
        with begin():
            return await inner(request, context)

    async def many(request: Any, context: Any) -> AsyncIterator[Any]:
        with begin():
            async with aclosing(inner(request, context)) as answers:
                async for answer in answers:
                    yield answer

    return rebuilt(handler, many if handler.response_streaming else one)
