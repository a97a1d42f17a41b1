"""Who asks: carried along with a request, so that queue, quotas, logs and audit need not be handed it one by one.

A front (HTTP or gRPC) sets the caller at the start of a request; every task begun for that request inherits it. What
nobody asked for over a socket, such as the broker's rollouts, is graded for the service itself.
"""

from __future__ import annotations

import logging
import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

ANONYMOUS = "anonymous"
ITSELF = "itself"

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")


@dataclass(frozen=True, slots=True)
class Quota:
    """What one token allows; None is no bound."""

    max_in_flight: int | None = None
    submissions_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """One client and one request of it."""

    client: str = ITSELF
    request_id: str = ""
    quota: Quota = Quota()


_caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  (frozen)


def current_caller() -> Caller:
    """Whose request this task works for."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """From now on this task, and all it begins, work for `caller`."""
    _caller.set(caller)


def request_id_from(given: str | None) -> str:
    """The client's own id of its request when it is fit for a log, else a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


class CallerFilter(logging.Filter):
    """Adds client and request id to every log record made for a request."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Never drops one."""
        caller = current_caller()
        if caller.request_id:
            record.client = caller.client
            record.request_id = caller.request_id
        return True
