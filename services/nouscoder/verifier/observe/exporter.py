"""Export of spans over OTLP/HTTP. Imported only when `verifier.tracing_endpoint` is set.

INVARIANT: an exporter that cannot reach its receiver drops spans and delays no request.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

from nouscoder.config import ConfigError

_EXPORT_LIMIT_S = 5.0
_SHUTDOWN_LIMIT_MS = 5000


class SpanExport:
    """One exporter for the whole process."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is http(s)://host:port, with /v1/traces added unless it has a path. Raises ConfigError."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"verifier.tracing_endpoint: {endpoint!r:.80} is not an http address")
        url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        self._provider = TracerProvider(resource=Resource.create({"service.name": "nouscoder-verifier"}))
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_LIMIT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=_SHUTDOWN_LIMIT_MS))

    @property
    def tracer(self) -> Tracer:
        """The tracer whose spans are exported."""
        return self._provider.get_tracer("nouscoder.verifier")

    def close(self) -> None:
        """Send the remaining spans, for at most a few seconds."""
        self._provider.force_flush(_SHUTDOWN_LIMIT_MS)
        self._provider.shutdown()
