"""The trace to which the work of this task belongs, for exemplars. It needs no OpenTelemetry."""

from __future__ import annotations

from contextvars import ContextVar

# Hexadecimal id of the trace; "" when the request is not traced, or its trace is not sampled.
current_trace: ContextVar[str] = ContextVar("trace", default="")


def exemplar() -> dict[str, str] | None:
    """The labels of an exemplar of this task's work; None when it is not traced."""
    trace_id = current_trace.get()
    return {"trace_id": trace_id} if trace_id else None
