"""Errors as JSON, for middleware: a whole answer, or the last record of a stream that has begun."""

from __future__ import annotations

import json


def fault_record(detail: str, field: str | None) -> bytes:
    """The JSON of an error, with the fields of Fault."""
    return json.dumps({"detail": detail, "field": field}).encode()


def last_record(content_type: str, record: bytes) -> bytes:
    """The error as the last part of a stream of this type: an event `fault`, or a line."""
    return b"event: fault\ndata: " + record + b"\n\n" if "event-stream" in content_type else record + b"\n"
