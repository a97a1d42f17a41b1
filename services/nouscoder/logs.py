"""Logs on stderr: one JSON object per line for services, one sentence per line for a person. No password of a URL.

Both show all that a record has: its event, its level and the fields of `extra`. `reason` is the field that says why.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import typer

from nouscoder.errors import for_terminal, one_line, without_secrets

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
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return without_secrets(json.dumps(line, default=str))


class Sentences(logging.Formatter):
    """Formats a record as `level: event (field=value, ...): reason` in one line; the trace of an error comes below."""

    def format(self, record: logging.LogRecord) -> str:
        """The sentence."""
        extra = {name: value for name, value in _extra(record).items() if value not in (None, "")}
        reason = extra.pop("reason", "")
        fields = ", ".join(f"{name}={_plain(value)}" for name, value in extra.items())
        parts = [f"{record.getMessage()} ({fields})" if fields else record.getMessage(), str(reason)]
        line = f"{record.levelname.lower()}: {one_line(': '.join(filter(None, parts)))}"
        if record.exc_info:
            line += f"\n{for_terminal(self.formatException(record.exc_info))}"
        return without_secrets(line)


class _Terminal(logging.Handler):
    """Writes to what stderr is at that moment: a live panel puts its own in place, so that lines come above it."""

    _COLORS = {logging.WARNING: typer.colors.YELLOW, logging.ERROR: typer.colors.RED}  # noqa: RUF012

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; in colour where stderr is a terminal."""
        try:
            level, colon, rest = self.format(record).partition(":")
            typer.echo(f"{typer.style(level, fg=self._COLORS.get(record.levelno))}{colon}{rest}", err=True)
        except Exception:  # as every handler of the standard library
            self.handleError(record)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# torch warns at each import that it cannot count the operations of triton's kernels. Nothing here counts them.
logging.getLogger("torch.utils.flop_counter").setLevel("ERROR")


def show_logs_to_a_person() -> None:
    """Send every warning and error of this process to stderr as sentences."""
    handler = _Terminal()
    handler.setFormatter(Sentences())
    logging.basicConfig(level="WARNING", handlers=[handler], force=True)


def configure_logs(service: str) -> None:
    """Send every log of this process to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service))
    logging.basicConfig(level="INFO", handlers=[handler], force=True)
