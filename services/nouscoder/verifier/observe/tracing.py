"""Traces of grading over OTLP/HTTP. Imported only when `verifier.tracing_endpoint` is set.

    POST /v1/grade (or the gRPC method)     a child of the caller's span, given by W3C traceparent
      grade                                 what was graded and the verdict; not there for an answer from the cache
        queue                               from acceptance to the first sandbox
        sandbox                             waiting for its namespaces, and compiling; one for each sandbox
        test                                one a test that counts: index, outcome, times

INVARIANT: no span holds source, input, output, expected output or a token; every span that was begun ends; an exporter
that cannot reach its receiver drops spans and holds up nobody.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TypeVar
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from nouscoder.config import ConfigError
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import TestOutcome, Verdict
from nouscoder.verifier.access.caller import current_caller
from nouscoder.verifier.grading.grader import OnOutcome
from nouscoder.verifier.grading.grader_decorator import GraderDecorator
from nouscoder.verifier.grading.verdict_cache import Grading
from nouscoder.verifier.sandbox.base import Program, Sandbox, Session

_EXPORT_LIMIT_S = 5.0
_SHUTDOWN_LIMIT_MS = 5000
_NS = 1_000_000_000
_PROPAGATED = ("traceparent", "tracestate")

Opened = TypeVar("Opened")

# Not OpenTelemetry's own: a span is never "made current" and put back, because a stream's generator may be closed in
# another context than it was begun in. A request has a task of its own, so what is set here never has to be undone.
_within: ContextVar[Context | None] = ContextVar("span", default=None)
_accepted_ns: ContextVar[list[int] | None] = ContextVar("accepted", default=None)  # emptied by the first sandbox


class Tracing:
    """One exporter a process."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is http(s)://host:port, or with a path other than /v1/traces. Raises ConfigError."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"verifier.tracing_endpoint: {endpoint!r:.80} is no http address")
        url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        self._provider = TracerProvider(resource=Resource.create({"service.name": "nouscoder-verifier"}))
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_LIMIT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=_SHUTDOWN_LIMIT_MS))
        self._tracer = self._provider.get_tracer("nouscoder.verifier")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Iterator[trace.Span]:
        """A request's span; `headers` may have its caller's traceparent. It is the parent of what its task does."""
        parent = self._propagator.extract(
            {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        )
        with self._span(name, parent, trace.SpanKind.SERVER) as span:
            _within.set(trace.set_span_in_context(span))
            yield span

    @contextmanager
    def step(self, name: str, **attributes: str | int | float | bool) -> Iterator[trace.Span]:
        """A part of what this task does; what is begun inside is below it."""
        with self._span(name, _within.get(), trace.SpanKind.INTERNAL) as span:
            span.set_attributes(attributes)
            yield span

    def past(
        self, name: str, begun_ns: int, ended_ns: int, parent: Context | None, **attributes: str | int | float
    ) -> None:
        """A span of what has already been."""
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

    def close(self) -> None:
        """Send what is left, within a few seconds."""
        self._provider.force_flush(_SHUTDOWN_LIMIT_MS)
        self._provider.shutdown()


class TracedGrader(GraderDecorator):
    """`inner`, with a span a submission and one a test."""

    def __init__(self, inner: Grading, tracing: Tracing) -> None:
        super().__init__(inner)
        self._tracing = tracing

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """As Grader.grade."""
        kind = type(submission.tests).__name__
        with self._tracing.step("grade", language=submission.language, tests_type=kind) as span:
            here = trace.set_span_in_context(span)

            def told(outcome: TestOutcome) -> None:
                self._tell_test(outcome, here)
                if on_outcome is not None:
                    on_outcome(outcome)

            within, accepted = _within.set(here), _accepted_ns.set([time.time_ns()])
            try:
                verdict = await self._inner.grade(submission, told)
            finally:
                _within.reset(within)
                _accepted_ns.reset(accepted)
            span.set_attributes({"verdict": verdict.kind.value, "passed": verdict.passed, "total": verdict.total})
            span.set_attributes({"client": current_caller().client, "backend": verdict.backend})
            return verdict

    def _tell_test(self, outcome: TestOutcome, parent: Context) -> None:
        """It is told of at its end, or a little later."""
        now_ns = time.time_ns()
        self._tracing.past(
            "test",
            now_ns - int(outcome.wall_time_s * _NS),
            now_ns,
            parent,
            index=outcome.index,
            outcome=outcome.outcome.value,
            wall_time_s=outcome.wall_time_s,
            cpu_time_s=outcome.cpu_time_s,
            memory_bytes=outcome.memory_bytes,
        )


class TracedSandbox:
    """`inner`, with a span for what a submission waits for before its first test."""

    def __init__(self, inner: Sandbox, tracing: Tracing) -> None:
        self._inner = inner
        self._tracing = tracing
        self.name = inner.name
        self.num_slots = inner.num_slots

    @property
    def isolation(self) -> tuple[str, ...]:
        """See `Sandbox`."""
        return self._inner.isolation

    @property
    def runners(self) -> Mapping[str, int]:
        """See `Sandbox`."""
        return self._inner.runners

    @property
    def replacements(self) -> Mapping[str, int]:
        """See `Sandbox`."""
        return self._inner.replacements

    async def start(self) -> None:
        """See `Sandbox`."""
        await self._inner.start()

    def session(self, program: Program) -> AbstractAsyncContextManager[Session]:
        """See `Sandbox`."""
        return self._told(self._inner.session(program), program)

    def pair(self, program: Program, partner: Program) -> AbstractAsyncContextManager[tuple[Session, Session]]:
        """See `Sandbox`."""
        return self._told(self._inner.pair(program, partner), program)

    async def close(self) -> None:
        """See `Sandbox`."""
        await self._inner.close()

    @asynccontextmanager
    async def _told(self, opened: AbstractAsyncContextManager[Opened], program: Program) -> AsyncIterator[Opened]:
        """Only the way in is timed; what is inside, and the way out, is not."""
        waited = _accepted_ns.get()
        if waited:
            self._tracing.past("queue", waited.pop(), time.time_ns(), _within.get())
        async with AsyncExitStack() as stack:
            with self._tracing.step("sandbox", backend=self.name, language=program.language.name):
                entered = await stack.enter_async_context(opened)
            yield entered
