"""Whether grading is traced: what is to be watched goes to a `Telemetry` and comes back watched, or as it is.

OpenTelemetry's SDK and exporter are not imported while tracing is off (its API is: FastAPI needs it).
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Protocol

import grpc
from fastapi import FastAPI

from nouscoder.errors import Unusable
from nouscoder.verifier.grading.verdict_cache import Grading
from nouscoder.verifier.sandbox.base import Sandbox

if TYPE_CHECKING:
    from nouscoder.verifier.observe.tracing import Tracing


class TracingUnusable(Unusable):
    """Traces are asked for and cannot be made; the message says why."""


class Telemetry(Protocol):
    """See the module."""

    def sandbox(self, sandbox: Sandbox) -> Sandbox:
        """For the grader."""
        ...

    def grader(self, grader: Grading) -> Grading:
        """To stand right before the grader, behind the cache."""
        ...

    def watch(self, app: FastAPI) -> None:
        """The REST API, before it is served."""
        ...

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """To stand before all others."""
        ...


class _Off:
    def sandbox(self, sandbox: Sandbox) -> Sandbox:
        """As it is."""
        return sandbox

    def grader(self, grader: Grading) -> Grading:
        """As it is."""
        return grader

    def watch(self, app: FastAPI) -> None:
        """Nothing."""

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """None."""
        return []


class _On:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def sandbox(self, sandbox: Sandbox) -> Sandbox:
        """With spans."""
        from nouscoder.verifier.observe.tracing import TracedSandbox

        return TracedSandbox(sandbox, self._tracing)

    def grader(self, grader: Grading) -> Grading:
        """With spans."""
        from nouscoder.verifier.observe.tracing import TracedGrader

        return TracedGrader(grader, self._tracing)

    def watch(self, app: FastAPI) -> None:
        """With a span a request."""
        from nouscoder.verifier.observe.tracing_fronts import TraceRequests

        app.add_middleware(TraceRequests, tracing=self._tracing)

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """A span a call."""
        from nouscoder.verifier.observe.tracing_fronts import TraceCalls

        return [TraceCalls(self._tracing)]


def open_telemetry(endpoint: str, stack: AsyncExitStack) -> Telemetry:
    """Traces to `endpoint`, none when it is empty; `stack` sends what is left. Raises TracingUnusable, ConfigError."""
    if not endpoint:
        return _Off()
    try:
        from nouscoder.verifier.observe.tracing import Tracing
    except ImportError as error:
        raise TracingUnusable(
            f"verifier.tracing_endpoint needs OpenTelemetry, install the project's `tracing` extra ({error})"
        ) from error
    tracing = Tracing(endpoint)
    stack.push_async_callback(asyncio.to_thread, tracing.close)  # it waits for the receiver, a few seconds at most
    return _On(tracing)
