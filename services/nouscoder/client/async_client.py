"""The asyncio client. It has the same calls as the synchronous one (sync_client.py).

INVARIANT: `grade_many` yields one result for each request, in their order; at most `at_once` are in progress.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack, cast

import httpx

from nouscoder.client.calls import AHEAD, GRADE_PATH, RUN_CODE_PATH, STREAM_PATH, TESTS_PATH, run_code_record
from nouscoder.client.errors import GradingFailed, failure_of_transport, record_of
from nouscoder.client.events import Event, EventReader
from nouscoder.client.records import GradeAnswer, GradeRequest, RunAnswer
from nouscoder.client.retries import Attempts, Outcome, Patience, authorization


class AsyncClient:
    """It belongs to one event loop. `num_connections` bounds the requests in progress; the rest is as for `Client`."""

    def __init__(
        self,
        url: str,
        patience: Patience | None = None,
        num_connections: int = 32,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=authorization(token),
            limits=httpx.Limits(max_connections=num_connections),
            verify=tls or True,
            transport=transport,
        )

    async def grade(
        self, *, request_id: str | None = None, deadline_s: float | None = None, **fields: Unpack[GradeRequest]
    ) -> GradeAnswer:
        """See `Client.grade`."""
        return await self.grade_record(fields, request_id=request_id, deadline_s=deadline_s)

    async def grade_record(
        self, record: Mapping[str, Any], *, request_id: str | None = None, deadline_s: float | None = None
    ) -> GradeAnswer:
        """See `Client.grade_record`."""
        attempts = Attempts(self._patience, request_id, deadline_s)
        return cast("GradeAnswer", await self._request("POST", GRADE_PATH, record, attempts))

    async def grade_many(
        self, requests: Iterable[Mapping[str, Any]], *, at_once: int = 16, deadline_s: float | None = None
    ) -> AsyncIterator[GradeAnswer | GradingFailed]:
        """See `Client.grade_many`."""
        waiting: deque[asyncio.Task[GradeAnswer | GradingFailed]] = deque()
        places = asyncio.Semaphore(at_once)
        try:
            for request in requests:
                waiting.append(asyncio.create_task(self._graded(request, deadline_s, places)))
                if len(waiting) >= AHEAD * at_once:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def stream(
        self, *, request_id: str | None = None, deadline_s: float | None = None, **fields: Unpack[GradeRequest]
    ) -> AsyncIterator[Event]:
        """See `Client.stream`."""
        attempts = Attempts(self._patience, request_id, deadline_s)
        while True:
            reader = EventReader()
            outcome: Outcome
            try:
                sent = self._http.stream("POST", STREAM_PATH, json=fields, **attempts.send_arguments())
                async with sent as response:
                    if response.status_code == 200:
                        async for line in response.aiter_lines():
                            event = reader.feed(line)
                            if event is not None:
                                yield event
                        reader.finish()
                        return
                    await response.aread()
                    outcome = response
            except httpx.TransportError as error:
                if reader.begun:
                    raise failure_of_transport(error) from error
                outcome = error
            await asyncio.sleep(attempts.next_delay_s(outcome) or 0.0)

    async def run_code(
        self,
        code: str,
        *,
        language: str = "python",
        stdin: str = "",
        run_timeout_s: float = 10.0,
        memory_limit_mb: int | None = None,
        files: Mapping[str, bytes] | None = None,
        request_id: str | None = None,
        deadline_s: float | None = None,
    ) -> RunAnswer:
        """See `Client.run_code`."""
        record = run_code_record(code, language, stdin, run_timeout_s, memory_limit_mb, files)
        attempts = Attempts(self._patience, request_id, deadline_s)
        return cast("RunAnswer", await self._request("POST", RUN_CODE_PATH, record, attempts))

    async def put_tests(self, tests: Mapping[str, Any]) -> str:
        """See `Client.put_tests`."""
        return str((await self._request("PUT", TESTS_PATH, tests, Attempts(self._patience)))["digest"])

    async def _graded(
        self, request: Mapping[str, Any], deadline_s: float | None, places: asyncio.Semaphore
    ) -> GradeAnswer | GradingFailed:
        async with places:
            try:
                return await self.grade_record(request, deadline_s=deadline_s)
            except GradingFailed as error:
                return error

    async def _request(self, method: str, path: str, record: Mapping[str, Any], attempts: Attempts) -> dict[str, Any]:
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.request(method, path, json=record, **attempts.send_arguments())
            except httpx.TransportError as error:
                outcome = error
            delay_s = attempts.next_delay_s(outcome)
            if delay_s is None and isinstance(outcome, httpx.Response):
                return record_of(outcome)
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
