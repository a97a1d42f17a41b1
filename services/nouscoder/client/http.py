"""A client of the grading service over HTTP, with retries.

    with Client("http://127.0.0.1:8080") as client:
        answer = client.grade(code="print(3)", tests={"type": "stdin", "cases": [{"input": "", "output": "3"}]})
        answer["verdict"], answer["reward"]

Retries are bounded. The client retries when the service cannot be reached or drains (503), when the queue is full (429,
after its Retry-After), and after an answer of internal_error. Grading has no side effects, so a retry is always safe.
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
TESTS_PATH = "/v1/tests"
TOKEN_ENVIRONMENT = "NOUSCODER_TOKEN"
_RETRIED_STATUSES = frozenset({429, 502, 503, 504})


class GradingFailed(NousCoderError):
    """The service gave no verdict. The message says why. `status` is 0 when the service did not answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client retries, by the kind of failure."""

    timeout_s: float = 660.0  # for one answer
    busy_s: float = 300.0  # total wait while the queue is full or the service drains
    unreachable_s: float = 15.0  # total wait while the service does not answer
    internal_retries: int = 2  # retries after internal_error

    def limit_s(self, status: int) -> float:
        """The total wait in seconds for a request that fails with this status; 0 means no answer."""
        return self.unreachable_s if status == 0 else self.busy_s


@dataclass(slots=True)
class _Retries:
    """The retries of one request: their number and the total wait."""

    patience: Patience
    attempt: int = 0
    waited_s: float = 0.0

    def next_delay_s(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Seconds to wait before the next try; None when `outcome` is the final answer. Raises GradingFailed."""
        message, status, retry_after = _failure_of(outcome)
        if not message or (status == 200 and self.attempt >= self.patience.internal_retries):
            return None
        retried = status in _RETRIED_STATUSES or status in (0, 200)
        if not retried or self.waited_s >= self.patience.limit_s(status):
            raise GradingFailed(message, status)
        asked_s = float(retry_after) if retry_after is not None and retry_after.isdigit() else 0.0
        backoff_s = min(5.0, 0.1 * 2.0 ** min(self.attempt, 10))
        delay_s = min(60.0, max(asked_s, backoff_s)) * random.uniform(0.7, 1.0)
        self.attempt += 1
        self.waited_s += delay_s
        return delay_s


def _failure_of(outcome: httpx.Response | httpx.TransportError) -> tuple[str, int, str | None]:
    """(message, HTTP status, Retry-After). The message is "" for a success."""
    if not isinstance(outcome, httpx.Response):
        return f"the grading service does not answer: {type(outcome).__name__}: {outcome}", 0, None
    if outcome.status_code == 200:
        failed = _record(outcome).get("verdict") == "internal_error"
        return ("internal_error" if failed else ""), 200, None
    detail = _record(outcome).get("detail", outcome.text[:200])
    return f"HTTP {outcome.status_code}: {detail}", outcome.status_code, outcome.headers.get("retry-after")


def _headers(token: str | None) -> dict[str, str]:
    """The Authorization header for `token`, or for the key in the environment."""
    token = token if token is not None else os.environ.get(TOKEN_ENVIRONMENT, "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _record(response: httpx.Response) -> dict[str, Any]:
    try:
        record = response.json()
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


class Client:
    """The synchronous client. It has one connection pool and may be shared between threads.

    `token` is the API key, by default that of the environment variable NOUSCODER_TOKEN. `tls` holds the trusted
    authorities and the client certificate, by default the system's authorities and none.
    """

    def __init__(
        self, url: str, patience: Patience | None = None, token: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._patience = patience or Patience()
        timeout = httpx.Timeout(self._patience.timeout_s, connect=10.0)
        self._http = httpx.Client(base_url=url, timeout=timeout, headers=_headers(token), verify=tls or True)

    def grade(self, **fields: Any) -> dict[str, Any]:
        """Grade one submission, with the fields of POST /v1/grade. Returns the service's answer.

        Raises GradingFailed when the service refuses it or the retries are used up.
        """
        return self.grade_record(fields)

    def grade_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Like `grade`, with the request as one record."""
        return self._request("POST", GRADE_PATH, record)

    def put_tests(self, tests: Mapping[str, Any]) -> str:
        """Store tests once, with PUT /v1/tests. Returns their digest, for `tests={"digest": digest}` in `grade`.

        Raises GradingFailed like `grade`, with status 507 when the client has stored its maximum number of bytes.
        """
        return str(self._request("PUT", TESTS_PATH, tests)["digest"])

    def _request(self, method: str, path: str, record: Mapping[str, Any]) -> dict[str, Any]:
        retries = _Retries(self._patience)
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(method, path, json=record)
            except httpx.TransportError as error:
                outcome = error
            delay_s = retries.next_delay_s(outcome)
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
    """The asyncio client. It belongs to one event loop."""

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
        """See `Client.grade`."""
        return await self.grade_record(fields)

    async def grade_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """See `Client.grade_record`."""
        return await self._request("POST", GRADE_PATH, record)

    async def put_tests(self, tests: Mapping[str, Any]) -> str:
        """See `Client.put_tests`."""
        return str((await self._request("PUT", TESTS_PATH, tests))["digest"])

    async def _request(self, method: str, path: str, record: Mapping[str, Any]) -> dict[str, Any]:
        retries = _Retries(self._patience)
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.request(method, path, json=record)
            except httpx.TransportError as error:
                outcome = error
            delay_s = retries.next_delay_s(outcome)
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
