"""The caller of the current request, in a context variable that queue, quotas, logs and audit read.

HTTP and gRPC set the caller at the start of a request, and every task started for that request inherits it. Work that
no client requested, such as grading the broker's rollouts, has the service itself as its caller.
"""

from __future__ import annotations

import logging
import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

from nouscoder.http_server.api_keys import Quota

ANONYMOUS = "anonymous"
ITSELF = "itself"

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")


@dataclass(frozen=True, slots=True)
class Caller:
    """A client and its request."""

    client: str = ITSELF
    request_id: str = ""
    quota: Quota = Quota()
    in_background: bool = False  # a submission of a job, which waits while requests do

    @property
    def share(self) -> str | None:
        """Whose share of the memory the request takes: its client's; None without tokens, where all are one client."""
        return None if self.client in (ANONYMOUS, ITSELF) else self.client


_caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  (frozen)


def current_caller() -> Caller:
    """The caller of this task's request."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Set the caller of this task and of all tasks that it starts."""
    _caller.set(caller)


def request_id_from(proposed: str | None) -> str:
    """The client's own request id if it is safe to log, else a new one."""
    return proposed if proposed is not None and _REQUEST_ID.fullmatch(proposed) else secrets.token_hex(8)


class CallerFilter(logging.Filter):
    """Adds client and request id to every log record of a request."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields. Always returns True: no record is dropped."""
        caller = current_caller()
        if caller.request_id:
            record.client = caller.client
            record.request_id = caller.request_id
        return True
