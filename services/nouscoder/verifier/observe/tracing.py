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
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
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

from nouscoder.config import ConfigError
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import TestOutcome, Verdict
from nouscoder.errors import Unusable
from nouscoder.installation import how_to_install
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.grading.grader import GraderDecorator, Grading, OnOutcome
from nouscoder.verifier.observe.metrics import current_trace
from nouscoder.verifier.sandbox.base import Program, Sandbox, SandboxDecorator, Session

if TYPE_CHECKING:
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
