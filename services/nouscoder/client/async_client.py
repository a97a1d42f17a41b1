"""The asyncio client. `make client` makes the synchronous one (sync_client.py) from this file.

Lines that end with `# asyncio only` are not in the synchronous client.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack, cast

import httpx

from nouscoder.client.calls import (
    GRADE_PATH,
    INLINE_BYTES,
    JOBS_PATH,
    JSON,
    RUN_CODE_PATH,
    STREAM_PATH,
    TESTS_PATH,
    Event,
    EventReader,
    Requests,
    ResultReader,
    StoredDigests,
    encoded,
    opened_body,
    run_code_record,
    submit_arguments,
    tests_to_store,
)
from nouscoder.client.concurrency import async_in_order, async_lock, async_parts, async_sleep
from nouscoder.client.errors import BadRequest, GradingFailed, failure_of_transport, record_of
from nouscoder.client.records import GradeAnswer, GradeRequest, JobAnswer, JobResult, RunAnswer
from nouscoder.client.retries import Attempts, Outcome, Patience, authorization


class AsyncJob:
    """Many submissions that were sent at once, made by `submit_job` and `job` of a client.

    `id` names it, also after a restart of this program.
    """

    def __init__(self, job_id: str, client: AsyncClient) -> None:
        self.id = job_id
        self._path = f"{JOBS_PATH}/{job_id}"
        self._client = client

    async def state(self) -> JobAnswer:
        """How far it is. Raises BadRequest when it was removed."""
        return cast("JobAnswer", await self._client._call("GET", self._path))

    async def results(self, offset: int = 0) -> AsyncIterator[JobResult]:
        """Each result once, as soon as it is there, in order of completion, until the job has ended.

        `offset` leaves out that many bytes of results. Raises JobEnded after the last result of a job that ended early.
        """
        reader = ResultReader(offset)
        while True:
            before = reader.offset
            async for part in self._client._read(f"{self._path}/results", reader.parameters):
                for result in reader.feed(part):
                    yield result
            if reader.offset == before and reader.is_ended(await self.state()):
                return

    async def delete(self) -> JobAnswer:
        """Stop it and remove it with its results. Returns its last state."""
        return cast("JobAnswer", await self._client._call("DELETE", self._path))


class AsyncClient:
    """It has one pool of connections. The asyncio client belongs to one event loop; threads may share the other.

    `token` is the API key, by default that of the environment variable NOUSCODER_TOKEN. `tls` holds the trusted
    authorities and the client certificate, by default the system's authorities and none. `transport` takes the place
    of the network, for tests and proxies. `num_connections` of the asyncio client bounds the requests in progress.

    Each call takes a `request_id`, which the service writes to its logs, and a `deadline_s`, which bounds the call with
    all its retries in seconds. Each call raises GradingFailed when the service gives no answer (errors.py).
    """

    def __init__(
        self,
        url: str,
        patience: Patience | None = None,
        num_connections: int = 32,  # asyncio only
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._digests, self._storing = StoredDigests(), async_lock()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=authorization(token),
            limits=httpx.Limits(max_connections=num_connections),  # asyncio only
            verify=tls or True,
            transport=transport,
        )

    async def grade(
        self, *, request_id: str | None = None, deadline_s: float | None = None, **fields: Unpack[GradeRequest]
    ) -> GradeAnswer:
        """Grade one submission, with the fields of POST /v1/grade."""
        return await self.grade_record(fields, request_id=request_id, deadline_s=deadline_s)

    async def grade_record(
        self, record: Mapping[str, Any], *, request_id: str | None = None, deadline_s: float | None = None
    ) -> GradeAnswer:
        """Like `grade`, with the request as one record that no type checker has seen."""
        attempts = Attempts(self._patience, request_id, deadline_s)
        body = await self._body(record, attempts)
        try:
            return cast("GradeAnswer", await self._sent("POST", GRADE_PATH, body, attempts))
        except BadRequest as error:
            if not self._digests.can_help(record, error):
                raise
        body = await self._body(record, attempts, stores=True)
        return cast("GradeAnswer", await self._sent("POST", GRADE_PATH, body, attempts))

    def grade_many(
        self, requests: Iterable[Mapping[str, Any]], *, at_once: int = 16, deadline_s: float | None = None
    ) -> AsyncIterator[GradeAnswer | GradingFailed]:
        """Grade many, `at_once` at a time. Yields an answer or the error for each request, in their order.

        `deadline_s` is for each request. Requests are read only as the results are taken.
        """

        async def graded(request: Mapping[str, Any]) -> GradeAnswer | GradingFailed:
            try:
                return await self.grade_record(request, deadline_s=deadline_s)
            except GradingFailed as error:
                return error

        return async_in_order(graded, requests, at_once)

    async def stream(
        self, *, request_id: str | None = None, deadline_s: float | None = None, **fields: Unpack[GradeRequest]
    ) -> AsyncIterator[Event]:
        """Grade one submission: an OutcomeAnswer for each test as it ends, then the GradeAnswer ("verdict" in it)."""
        attempts = Attempts(self._patience, request_id, deadline_s)
        body, may_store = await self._body(fields, attempts), True
        while True:
            reader = EventReader()
            outcome: Outcome
            try:
                sent = self._http.stream("POST", STREAM_PATH, content=body, **attempts.send_arguments(JSON))
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
                await async_sleep(attempts.next_delay_s(outcome) or 0.0)
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
        """Run a program once without tests. `files` are beside it, by name. The answer's `files` are those of `fetch`
        that it has written, in base64.
        """
        record = run_code_record(code, language, stdin, run_timeout_s, memory_limit_mb, files, fetch)
        attempts = Attempts(self._patience, request_id, deadline_s)
        return cast("RunAnswer", await self._sent("POST", RUN_CODE_PATH, encoded(record), attempts))

    async def put_tests(self, tests: Mapping[str, Any]) -> str:
        """Store tests once, with PUT /v1/tests. Returns their digest, for `tests={"digest": digest}` in `grade`.

        Raises StorageFull when the client has stored its maximum number of bytes.
        """
        return str((await self._sent("PUT", TESTS_PATH, encoded(tests), Attempts(self._patience)))["digest"])

    async def submit_job(
        self,
        requests: Requests,
        *,
        priority: int = 0,
        tests: bool = False,
        webhook: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncJob:
        """Send many submissions at once, with POST /v1/jobs. `requests` are records, or a file of lines or parquet.

        Of the client's jobs those with a higher `priority` (0 to 9) are graded first. With `tests` each result has the
        outcome of each test. `webhook` is a URL that is told of the end. Raises StorageFull when there are too many.
        """
        attempts = Attempts(self._patience)
        with opened_body(requests) as (body, kind):
            for request in () if isinstance(requests, Path) else requests:
                body.write(await self._body(request, attempts) + b"\n")
            parameters, headers = submit_arguments(kind, priority, tests, webhook, idempotency_key)

            async def send(arguments: dict[str, Any]) -> httpx.Response:
                body.seek(0)
                return await self._http.post(JOBS_PATH, params=parameters, content=async_parts(body), **arguments)

            return self.job(str((await self._answered(send, attempts, headers))["id"]))

    def job(self, job_id: str) -> AsyncJob:
        """A job that was submitted before."""
        return AsyncJob(job_id, self)

    async def jobs(self) -> list[JobAnswer]:
        """The states of the client's jobs, the newest first."""
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
            await async_sleep(attempts.next_delay_s(outcome) or 0.0)

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

    async def _sent(self, method: str, path: str, body: bytes, attempts: Attempts) -> dict[str, Any]:
        return await self._answered(
            lambda arguments: self._http.request(method, path, content=body, **arguments), attempts, JSON
        )

    async def _answered(
        self,
        send: Callable[[dict[str, Any]], Awaitable[httpx.Response]],
        attempts: Attempts,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The answer to what `send` sends, as often as it takes."""
        while True:
            outcome: Outcome
            try:
                outcome = await send(attempts.send_arguments(headers))
            except httpx.TransportError as error:
                outcome = error
            delay_s = attempts.next_delay_s(outcome)
            if delay_s is None and isinstance(outcome, httpx.Response):
                return record_of(outcome)
            await async_sleep(delay_s or 0.0)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
