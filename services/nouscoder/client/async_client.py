"""The asyncio client. It has the same calls as the synchronous one (sync_client.py).

INVARIANT: `grade_many` yields one result for each request, in their order; at most `at_once` are in progress.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, Unpack, cast

import httpx

from nouscoder.client.async_job import AsyncJob
from nouscoder.client.calls import AHEAD, GRADE_PATH, JOBS_PATH, RUN_CODE_PATH, STREAM_PATH, TESTS_PATH, run_code_record
from nouscoder.client.errors import BadRequest, GradingFailed, failure_of_transport, record_of
from nouscoder.client.events import Event, EventReader
from nouscoder.client.job_calls import PART_BYTES, Requests, opened_body, submit_arguments
from nouscoder.client.large_tests import INLINE_BYTES, JSON, StoredDigests, encoded, tests_to_store
from nouscoder.client.records import GradeAnswer, GradeRequest, JobAnswer, RunAnswer
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
        self._digests, self._storing = StoredDigests(), asyncio.Lock()
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
        body = await self._body(record, attempts)
        try:
            return cast("GradeAnswer", await self._sent("POST", GRADE_PATH, body, attempts))
        except BadRequest as error:
            if not self._digests.can_help(record, error):
                raise
        body = await self._body(record, attempts, stores=True)
        return cast("GradeAnswer", await self._sent("POST", GRADE_PATH, body, attempts))

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
        body, may_store = await self._body(fields, attempts), True
        while True:
            reader = EventReader()
            outcome: Outcome
            try:
                sent = self._http.stream("POST", STREAM_PATH, content=body, **_json(attempts))
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
            try:
                await asyncio.sleep(attempts.next_delay_s(outcome) or 0.0)
            except BadRequest as error:
                if not may_store or not self._digests.can_help(fields, error):
                    raise
                body, may_store = await self._body(fields, attempts, stores=True), False

    async def run_code(
        self,
        code: str,
        *,
        language: str = "python",
        stdin: str = "",
        run_timeout_s: float = 10.0,
        memory_limit_mb: int | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        request_id: str | None = None,
        deadline_s: float | None = None,
    ) -> RunAnswer:
        """See `Client.run_code`."""
        record = run_code_record(code, language, stdin, run_timeout_s, memory_limit_mb, files, fetch)
        attempts = Attempts(self._patience, request_id, deadline_s)
        return cast("RunAnswer", await self._request("POST", RUN_CODE_PATH, record, attempts))

    async def put_tests(self, tests: Mapping[str, Any]) -> str:
        """See `Client.put_tests`."""
        return str((await self._request("PUT", TESTS_PATH, tests, Attempts(self._patience)))["digest"])

    async def submit_job(
        self,
        requests: Requests,
        *,
        priority: int = 0,
        tests: bool = False,
        webhook: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncJob:
        """See `Client.submit_job`."""
        attempts = Attempts(self._patience)
        with opened_body(requests) as (body, kind):
            for request in () if isinstance(requests, Path) else requests:
                body.write(await self._body(request, attempts) + b"\n")
            parameters, headers = submit_arguments(kind, priority, tests, webhook, idempotency_key)

            async def send(arguments: dict[str, Any]) -> httpx.Response:
                body.seek(0)
                arguments["headers"] |= headers
                return await self._http.post(JOBS_PATH, params=parameters, content=_parts(body), **arguments)

            return self.job(str((await self._answered(send, attempts))["id"]))

    def job(self, job_id: str) -> AsyncJob:
        """See `Client.job`."""
        return AsyncJob(job_id, self._call, self._read)

    async def jobs(self) -> list[JobAnswer]:
        """See `Client.jobs`."""
        return list((await self._call("GET", JOBS_PATH))["jobs"])

    async def _call(self, method: str, path: str) -> dict[str, Any]:
        return await self._answered(
            lambda arguments: self._http.request(method, path, **arguments), Attempts(self._patience)
        )

    async def _read(self, path: str, parameters: Callable[[], Mapping[str, str]]) -> AsyncIterator[bytes]:
        """The bytes of an answer. A broken connection ends them; the caller continues where they ended.

        Parts are yielded as they come, because httpx drops what it has collected when the connection breaks.
        """
        attempts = Attempts(self._patience)
        while True:
            outcome: Outcome
            begun = False
            try:
                sent = self._http.stream("GET", path, params=parameters(), **attempts.send_arguments())
                async with sent as response:
                    if response.status_code == 200:
                        async for part in response.aiter_raw():
                            begun = True
                            yield part
                        return
                    await response.aread()
                    outcome = response
            except httpx.TransportError as error:
                if begun:
                    return
                outcome = error
            await asyncio.sleep(attempts.next_delay_s(outcome) or 0.0)

    async def _graded(
        self, request: Mapping[str, Any], deadline_s: float | None, places: asyncio.Semaphore
    ) -> GradeAnswer | GradingFailed:
        async with places:
            try:
                return await self.grade_record(request, deadline_s=deadline_s)
            except GradingFailed as error:
                return error

    async def _body(self, record: Mapping[str, Any], attempts: Attempts, *, stores: bool = False) -> bytes:
        """The body of a request. Tests that are too large for it, or all with `stores`, are stored first."""
        body = encoded(record)
        tests = tests_to_store(record) if stores or len(body) > INLINE_BYTES else None
        if tests is None:
            return body
        async with self._storing:
            digest = self._digests.of(tests)
            if digest is None:
                answer = await self._sent("PUT", TESTS_PATH, tests, attempts)
                digest = self._digests.keep(tests, str(answer["digest"]))
        return encoded({**record, "tests": {"digest": digest}})

    async def _request(self, method: str, path: str, record: Mapping[str, Any], attempts: Attempts) -> dict[str, Any]:
        return await self._sent(method, path, encoded(record), attempts)

    async def _sent(self, method: str, path: str, body: bytes, attempts: Attempts) -> dict[str, Any]:
        def send(arguments: dict[str, Any]) -> Awaitable[httpx.Response]:
            arguments["headers"] |= JSON
            return self._http.request(method, path, content=body, **arguments)

        return await self._answered(send, attempts)

    async def _answered(
        self, send: Callable[[dict[str, Any]], Awaitable[httpx.Response]], attempts: Attempts
    ) -> dict[str, Any]:
        """The answer to what `send` sends, as often as it takes."""
        while True:
            outcome: Outcome
            try:
                outcome = await send(attempts.send_arguments())
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


async def _parts(body: IO[bytes]) -> AsyncIterator[bytes]:
    while part := await asyncio.to_thread(body.read, PART_BYTES):
        yield part


def _json(attempts: Attempts) -> dict[str, Any]:
    """The arguments of a request whose body is JSON."""
    arguments = attempts.send_arguments()
    return arguments | {"headers": arguments["headers"] | JSON}
