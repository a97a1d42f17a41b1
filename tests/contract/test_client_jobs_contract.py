"""One suite for the jobs of both grading clients: against a real service, and against broken connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.client import AsyncClient, AsyncJob, BadRequest, Client, GradingFailed, Job, JobEnded, Patience
from nouscoder.config import JobsSection
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.jobs.service import open_jobs
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

IMPATIENT = Patience(unreachable_s=0.3, busy_s=0.3)


def request(number: int) -> dict[str, Any]:
    """A submission that is right when its number is even. Programs echo their input."""
    tests = {"type": "stdin", "cases": [{"input": "a", "output": "ab"[number % 2]}]}
    return {"id": f"s{number}", "code": f"# {number}", "tests": tests}


class Either:
    """Calls one of the two clients; the synchronous one in a thread."""

    def __init__(self, kind: str, url: str, handler: Any = None) -> None:
        transport = None if handler is None else httpx.MockTransport(handler)
        self.sync = Client(url, IMPATIENT, transport=transport) if kind == "sync" else None
        self.asynchronous = AsyncClient(url, IMPATIENT, transport=transport)

    async def submit(self, requests: Any, **options: Any) -> Job | AsyncJob:
        if self.sync is not None:
            return await asyncio.to_thread(self.sync.submit_job, requests, **options)
        return await self.asynchronous.submit_job(requests, **options)

    async def results(self, job: Job | AsyncJob, offset: int = 0) -> list[Any]:
        if isinstance(job, Job):
            return await asyncio.to_thread(lambda: list(job.results(offset)))
        return [result async for result in job.results(offset)]

    async def call(self, job: Job | AsyncJob, name: str) -> Mapping[str, Any]:
        if isinstance(job, Job):
            answer: Mapping[str, Any] = await asyncio.to_thread(getattr(job, name))
            return answer
        awaited: Mapping[str, Any] = await getattr(job, name)()
        return awaited

    def job(self, job_id: str) -> Job | AsyncJob:
        return self.sync.job(job_id) if self.sync is not None else self.asynchronous.job(job_id)

    async def jobs(self) -> list[Any]:
        return list(
            await asyncio.to_thread(self.sync.jobs) if self.sync is not None else await self.asynchronous.jobs()
        )


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(kind: str, tmp_path: Path) -> AsyncIterator[Either]:
    """A client of a real service."""
    sandbox, registry, budget = FakeSandbox(), CollectorRegistry(), MemoryBudget(1_000_000)
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(registry))
    async with AsyncExitStack() as stack:
        section = JobsSection(folder=str(tmp_path / "jobs"))
        jobs = await stack.enter_async_context(open_jobs(section, grader, budget, 100_000))
        assert jobs is not None
        app = make_app(grader, registry, DrainState(), 100_000, budget=budget, jobs=jobs)
        address = await start_http(app, "127.0.0.1:0", stack)
        work = asyncio.create_task(jobs.run())
        either = Either(kind, f"http://{address}")
        stack.push_async_callback(either.asynchronous.close)
        yield either
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def test_a_job_of_records_yields_each_result_once(client: Either) -> None:
    job = await client.submit((request(number) for number in range(30)), priority=3, tests=True)
    results = await client.results(job)
    assert {result["id"]: result["verdict"] for result in results} == {
        f"s{number}": ("accepted", "wrong_answer")[number % 2] for number in range(30)
    }
    assert len(results) == 30
    state = await client.call(job, "state")
    assert (state["state"], state["done"], state["priority"]) == ("finished", 30, 3)
    assert await client.results(client.job(job.id), state["results_bytes"]) == []
    assert [one["id"] for one in await client.jobs()] == [job.id]
    assert (await client.call(job, "delete"))["state"] == "finished"
    with pytest.raises(BadRequest, match="or it was removed"):
        await client.call(job, "state")
    with pytest.raises(BadRequest, match="or it was removed"):
        await client.results(job)


async def test_a_job_of_a_file_and_a_repeated_one(client: Either, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps(request(number)) + "\n" for number in range(5)))
    first = await client.submit(file, idempotency_key="epoch 1")
    again = await client.submit(file, idempotency_key="epoch 1")
    assert first.id == again.id
    assert len(await client.results(again)) == 5


async def test_a_refused_job_is_raised_at_once(client: Either) -> None:
    with pytest.raises(BadRequest, match="this service calls none") as refused:
        await client.submit([request(0)], webhook="https://a.example/")
    assert refused.value.field == "webhook"
    with pytest.raises(BadRequest, match="holds no submission"):
        await client.submit([])


LINES = [json.dumps({"key": str(number), "id": number, "verdict": "accepted"}).encode() + b"\n" for number in range(9)]
WHOLE = b"".join(LINES)


class Broken(httpx.AsyncByteStream, httpx.SyncByteStream):
    """An answer whose connection breaks after `size` bytes."""

    def __init__(self, text: bytes, size: int) -> None:
        self._parts = [text[begin : begin + 7] for begin in range(0, size, 7)]
        self._is_cut = size < len(text)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts
        if self._is_cut:
            raise httpx.ReadError("the connection broke")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if self._is_cut:
            raise httpx.ReadError("the connection broke")


def answering(state: str, sizes: list[int], offsets: list[int]) -> Any:
    """A service whose job has WHOLE as results and whose answers break after `sizes` bytes."""

    def handle(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/results"):
            numbers = {"done": len(LINES), "total": 12, "results_bytes": len(WHOLE)}
            return httpx.Response(200, json={"id": "j", "state": state, "detail": "why", **numbers})
        offset = int(request.url.params["offset"])
        offsets.append(offset)
        text = WHOLE[offset:]
        return httpx.Response(200, stream=Broken(text, sizes.pop(0) if sizes else len(text)))

    return handle


async def test_a_broken_connection_is_continued_after_the_last_whole_result(kind: str) -> None:
    offsets: list[int] = []
    broken = [60, 5, 100, 150]
    client = Either(kind, "http://verifier.test", answering("finished", broken, offsets))
    results = await client.results(client.job("j"))
    assert [result["id"] for result in results] == list(range(9))
    assert all(WHOLE[:offset].count(b"\n") * len(LINES[0]) == offset for offset in offsets)
    assert len(offsets) > 5


async def test_a_job_that_ended_early_is_an_error_after_its_results(kind: str) -> None:
    client = Either(kind, "http://verifier.test", answering("expired", [], []))
    job, found = client.job("j"), []
    with pytest.raises(JobEnded, match="the job j expired after 9 of 12 submissions: why"):  # noqa: PT012
        if isinstance(job, Job):
            for result in job.results():
                found.append(result["id"])
        else:
            async for result in job.results():
                found.append(result["id"])
    assert found == list(range(9))


async def test_a_service_that_is_gone_is_an_error_and_a_busy_one_gets_the_same_body_and_key_again(kind: str) -> None:
    def gone(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = Either(kind, "http://verifier.test", gone)
    with pytest.raises(GradingFailed, match="does not answer"):
        await client.results(client.job("j"))

    seen: list[tuple[bytes, str]] = []

    def busy(request: httpx.Request) -> httpx.Response:
        seen.append((request.read(), request.headers["idempotency-key"]))
        return httpx.Response(429) if len(seen) < 2 else httpx.Response(202, json={"id": "new"})

    async def busy_async(request: httpx.Request) -> httpx.Response:
        await request.aread()
        return busy(request)

    client = Either(kind, "http://verifier.test", busy if kind == "sync" else busy_async)
    assert (await client.submit([request(1), request(2)])).id == "new"
    assert seen[0] == seen[1]
    assert len(seen[0][0].splitlines()) == 2
