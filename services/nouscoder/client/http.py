"""A client of the grading service over HTTP, with retries: light enough for any trainer's process.

    with Client("http://127.0.0.1:8080") as client:
        answer = client.grade(code="print(3)", tests={"type": "stdin", "cases": [{"input": "", "output": "3"}]})
        answer["verdict"], answer["reward"]

Retried, a bounded number of times: a service that cannot be reached or drains (503), a full queue (429, after the
Retry-After it names), and an answer of internal_error. Grading has no effect, so asking again is always safe.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from nouscoder.errors import NousCoderError

GRADE_PATH = "/v1/grade"
TOKEN_ENVIRONMENT = "NOUSCODER_TOKEN"
_TRY_AGAIN = frozenset({429, 502, 503, 504})


class GradingFailed(NousCoderError):
    """No verdict could be had; the message says why. `status` is 0 when the service did not answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client keeps asking, by what goes wrong."""

    timeout_s: float = 660.0  # for one answer
    busy_s: float = 300.0  # in all, while the queue is full or the service drains
    unreachable_s: float = 15.0  # in all, while nobody answers
    internal_retries: int = 2  # after answers of internal_error

    def limit_s(self, status: int) -> float:
        """Seconds to wait in all for one request that goes wrong like this; status 0 is no answer."""
        return self.unreachable_s if status == 0 else self.busy_s


@dataclass(slots=True)
class _Asking:
    """The state of one request: how often it went wrong, and how long was waited."""

    patience: Patience
    attempt: int = 0
    waited_s: float = 0.0

    def next_delay_s(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """None when `outcome` is the answer; else seconds to wait. Raises GradingFailed when waiting is of no use."""
        message, status, retry_after = _trouble(outcome)
        if not message or (status == 200 and self.attempt >= self.patience.internal_retries):
            return None
        retried = status in _TRY_AGAIN or status in (0, 200)
        if not retried or self.waited_s >= self.patience.limit_s(status):
            raise GradingFailed(message, status)
        asked_s = float(retry_after) if retry_after is not None and retry_after.isdigit() else 0.0
        backoff_s = min(5.0, 0.1 * 2.0 ** min(self.attempt, 10))
        delay_s = min(60.0, max(asked_s, backoff_s)) * random.uniform(0.7, 1.0)
        self.attempt += 1
        self.waited_s += delay_s
        return delay_s


def _trouble(outcome: httpx.Response | httpx.TransportError) -> tuple[str, int, str | None]:
    """(what is wrong, HTTP status, Retry-After); an empty text when nothing is."""
    if not isinstance(outcome, httpx.Response):
        return f"the grading service does not answer: {type(outcome).__name__}: {outcome}", 0, None
    if outcome.status_code == 200:
        ours = _record(outcome).get("verdict") == "internal_error"
        return ("internal_error" if ours else ""), 200, None
    detail = _record(outcome).get("detail", outcome.text[:200])
    return f"HTTP {outcome.status_code}: {detail}", outcome.status_code, outcome.headers.get("retry-after")


def _headers(token: str | None) -> dict[str, str]:
    """`token`, or the one in the environment, as a header."""
    token = token if token is not None else os.environ.get(TOKEN_ENVIRONMENT, "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _record(response: httpx.Response) -> dict[str, Any]:
    try:
        record = response.json()
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


class Client:
    """Asks and waits. One connection pool; safe to share between threads.

    `token` is the service's bearer token, by default that of the environment's NOUSCODER_TOKEN; `tls` says whom to
    trust and which certificate to show, by default the system's authorities and none.
    """

    def __init__(
        self, url: str, patience: Patience | None = None, token: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._patience = patience or Patience()
        timeout = httpx.Timeout(self._patience.timeout_s, connect=10.0)
        self._http = httpx.Client(base_url=url, timeout=timeout, headers=_headers(token), verify=tls or True)

    def grade(self, **fields: Any) -> dict[str, Any]:
        """The service's answer to one submission, given by the fields of POST /v1/grade.

        Raises GradingFailed when it is refused or the patience is over.
        """
        return self.grade_record(fields)

    def grade_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """As `grade`, for a request at hand as one record."""
        asking = _Asking(self._patience)
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.post(GRADE_PATH, json=record)
            except httpx.TransportError as error:
                outcome = error
            delay_s = asking.next_delay_s(outcome)
            if delay_s is None and isinstance(outcome, httpx.Response):
                return _record(outcome)
            time.sleep(delay_s or 0.0)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """As Client, for asyncio; bound to one event loop."""

    def __init__(
        self,
        url: str,
        patience: Patience | None = None,
        num_connections: int = 32,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._patience = patience or Patience()
        limits = httpx.Limits(max_connections=num_connections)
        timeout = httpx.Timeout(self._patience.timeout_s, connect=10.0)
        headers = _headers(token)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=timeout, limits=limits, headers=headers, verify=tls or True
        )

    async def grade(self, **fields: Any) -> dict[str, Any]:
        """As Client.grade."""
        return await self.grade_record(fields)

    async def grade_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """As Client.grade_record."""
        asking = _Asking(self._patience)
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.post(GRADE_PATH, json=record)
            except httpx.TransportError as error:
                outcome = error
            delay_s = asking.next_delay_s(outcome)
            if delay_s is None and isinstance(outcome, httpx.Response):
                return _record(outcome)
            await asyncio.sleep(delay_s or 0.0)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
