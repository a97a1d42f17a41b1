"""Structured logs: one JSON object per line on stderr. No line holds a password of a URL."""

from __future__ import annotations

import json
import logging
import sys
import time

from nouscoder.errors import without_secrets

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record, with its `extra` fields, as one line of JSON."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return without_secrets(json.dumps(line, default=str))


def configure_logs(service: str, level: str = "INFO") -> None:
    """Send every log of this process to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)
