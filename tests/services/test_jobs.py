"""Jobs: received within bounds, graded in the background, resumed after a restart, read from any byte."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.config import JobsSection, VerifierSection
from nouscoder.errors import Unusable
from nouscoder.formats.json_values import BYTES_PER_WEIGHT
from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.installation import how_to_install
from nouscoder.verifier.access.quotas import QuotaGrader, Quotas
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.verdict_cache import CachedGrader
from nouscoder.verifier.jobs.service import Jobs, open_jobs
from nouscoder.verifier.jobs.webhooks import origin_of, signature
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import RunResult, SandboxError
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended

MAX_LINE = 20_000
NDJSON, PARQUET = "application/x-ndjson", "application/vnd.apache.parquet"
KEYS = "\n".join(f"{name}:{hashlib.sha256(name.encode()).hexdigest()}" for name in ("ann", "bob"))


def line(code: str = "echo", wanted: str = "a", **fields: Any) -> bytes:
    """One submission whose input is `a`."""
    tests = {"type": "stdin", "cases": [{"input": "a", "output": wanted}]}
    return json.dumps({"code": code, "tests": tests, **fields}).encode() + b"\n"


def lines(count: int) -> bytes:
    """Submissions with ids, every second one wrong."""
    return b"".join(line(wanted="ab"[n % 2], id=f"s{n}") for n in range(count))


@dataclass
class Running:
    http: httpx.AsyncClient
    jobs: Jobs
    sandbox: FakeSandbox
    budget: MemoryBudget

    async def submit(self, body: bytes | AsyncIterator[bytes], kind: str = NDJSON, **options: Any) -> httpx.Response:
        headers = {"Content-Type": kind, **options.pop("headers", {})}
        return await self.http.post("/v1/jobs", content=body, headers=headers, params=options)

    async def finished(self, job_id: str, **headers: str) -> dict[str, Any]:
        """The state of a job once it has ended."""
        async with asyncio.timeout(60):
            while True:
                state: dict[str, Any] = (await self.http.get(f"/v1/jobs/{job_id}", headers=headers)).json()
                if state["ended_s"] is not None:
                    return state
                await asyncio.sleep(0.01)

    async def results(self, job_id: str, **query: Any) -> list[dict[str, Any]]:
        answer = await self.http.get(f"/v1/jobs/{job_id}/results", params=query)
        assert answer.status_code == 200, answer.text
        return [json.loads(text) for text in answer.text.splitlines()]


class Table(dict[str, Callable[[bytes], RunResult]]):
    """The behaviour of programs by their code; others echo their input."""


@asynccontextmanager
async def serving(folder: Path, table: Table | None = None, slots: int = 2, **settings: Any) -> AsyncIterator[Running]:
    """A service with jobs in `folder`. `settings` are those of verifier.jobs, and `keys`."""
    keys = ApiKeys(environment=settings.pop("keys", None))
    sandbox, registry, budget = FakeSandbox(table or Table(), slots), CollectorRegistry(), MemoryBudget(110_000)
    await sandbox.start()
    metrics = VerifierMetrics(registry)
    core = Grader(sandbox, metrics, VerifierSection(max_queue=20))
    grader = QuotaGrader(CachedGrader(core, metrics, 10), Quotas())
    async with open_jobs(JobsSection(folder=str(folder), **settings), grader, budget, MAX_LINE) as jobs:
        assert jobs is not None
        app = make_app(grader, registry, DrainState(), MAX_LINE, keys, budget=budget, jobs=jobs)
        async with AsyncExitStack() as stack:
            url = "http://" + await start_http(app, "127.0.0.1:0", stack)
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
            work = asyncio.create_task(jobs.run())
            try:
                yield Running(http, jobs, sandbox, budget)
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)


async def test_each_submission_of_a_job_gets_one_result(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        sent = await service.submit(lines(40) + b"\n \n" + line(unknown=1) + b"{bad\n")
        assert sent.status_code == 202
        job = sent.json()
        assert (job["total"], job["state"], job["priority"]) == (42, "waiting", 0)
        state = await service.finished(job["id"])
        assert state["verdicts"] == {"accepted": 20, "wrong_answer": 20}
        assert (state["state"], state["done"], state["errors"]) == ("finished", 42, 2)
        assert state["removed_s"] == pytest.approx(state["ended_s"] + 86400)
        results = await service.results(job["id"])
        by_key = {int(result["key"]): result for result in results}
        assert sorted(by_key) == list(range(42))
        assert [by_key[n]["verdict"] for n in range(4)] == ["accepted", "wrong_answer"] * 2
        assert by_key[7]["id"] == "s7"
        assert by_key[40] == {"key": "40", "id": 40, "error": "unknown: unknown field", "field": "unknown"}
        assert by_key[41]["field"] == "body"
        assert "tests" not in by_key[0]
        assert [one["id"] for one in (await service.http.get("/v1/jobs")).json()["jobs"]] == [job["id"]]


async def test_a_job_can_be_read_from_every_result_on_and_from_nowhere_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        job_id = (await service.submit(lines(10), tests=True)).json()["id"]
        await service.finished(job_id)
        whole = (await service.http.get(f"/v1/jobs/{job_id}/results")).content
        offset = 0
        for number, text in enumerate(whole.splitlines(keepends=True)):
            assert len(await service.results(job_id, offset=offset)) == 10 - number
            assert len(json.loads(text)["tests"]) == 1
            offset += len(text)
        assert await service.results(job_id, offset=offset) == []
        for wrong in (1, offset - 1, offset + 1, -1):
            answer = await service.http.get(f"/v1/jobs/{job_id}/results", params={"offset": wrong})
            assert (answer.status_code, answer.json()["field"]) == (422, "offset")


async def test_a_reader_that_waits_gets_a_result_as_soon_as_there_is_one(tmp_path: Path) -> None:
    """With a barrier: the program is let go only after the reader waits."""
    let_go = asyncio.Event()
    async with serving(tmp_path, slots=1) as service:
        begin = service.sandbox.session

        @asynccontextmanager
        async def session(program: Any) -> AsyncIterator[Any]:
            async with begin(program) as opened:
                await let_go.wait()
                yield opened

        service.sandbox.session = session  # type: ignore[method-assign]
        job_id = (await service.submit(lines(1))).json()["id"]
        waiting = asyncio.create_task(service.results(job_id, wait_s=60))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        let_go.set()
        assert [result["id"] for result in await waiting] == ["s0"]


async def test_a_restart_in_the_middle_gives_the_same_results(tmp_path: Path) -> None:
    """The service is cancelled while submissions run, several times; nothing is graded twice or left out."""
    async with serving(tmp_path / "quiet") as service:
        job_id = (await service.submit(lines(60))).json()["id"]
        await service.finished(job_id)
        wanted = {result["key"]: result["verdict"] for result in await service.results(job_id)}
    job_id, seen, restarts = "", 0, 0
    while True:
        async with serving(tmp_path / "jobs", slots=1) as service:
            if not job_id:
                job_id = (await service.submit(lines(60))).json()["id"]
            before = (await service.http.get(f"/v1/jobs/{job_id}")).json()["done"]
            assert before >= seen, "results of the service before are kept"
            async with asyncio.timeout(60):
                while (state := service.jobs.state("anonymous", job_id)).done < min(60, before + 7):
                    await asyncio.sleep(0)
            seen = state.done
            if state.ended_s is not None:
                break
        restarts += 1
    assert restarts >= 3
    async with serving(tmp_path / "jobs") as service:
        assert service.sandbox.num_runs == 0, "a finished job is not graded again"
        results = await service.results(job_id)
        assert len(results) == 60
        assert {result["key"]: result["verdict"] for result in results} == wanted


async def test_a_torn_result_and_a_cut_upload_of_a_killed_service_are_made_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        job_id = (await service.submit(lines(6))).json()["id"]
        await service.finished(job_id)
    folder = tmp_path / job_id
    results = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "results.jsonl").write_bytes(b"".join(results[:4]) + results[4][:30])
    (folder / "end.json").unlink()
    (folder / "requests.jsonl").write_bytes(lines(6))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "requests.jsonl").write_bytes(lines(3))
    async with serving(tmp_path) as service:
        assert (await service.finished(job_id))["done"] == 6
        assert sorted(result["key"] for result in await service.results(job_id)) == list("012345")
        assert not (tmp_path / "cut").exists()


async def test_an_internal_error_is_graded_again_and_never_a_verdict(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("nouscoder.verifier.jobs.dispatcher._BROKEN_S", 0.001)
    failures = iter([True] * 2)

    def shaky(stdin: bytes) -> RunResult:
        if next(failures, False):
            raise SandboxError("lost")
        return ended(stdin)

    def broken(stdin: bytes) -> RunResult:
        raise SandboxError("lost")

    async with serving(tmp_path, Table(shaky=shaky, broken=broken)) as service:
        job_id = (await service.submit(line("shaky") + line("broken") + line("echo"))).json()["id"]
        state = await service.finished(job_id)
        assert (state["verdicts"], state["errors"]) == ({"accepted": 2}, 1)
        failed = next(result for result in await service.results(job_id) if result["key"] == "1")
        assert failed == {"key": "1", "id": 1, "error": "the service failed 3 times: lost", "field": None}


async def test_requests_pass_the_submissions_of_jobs(tmp_path: Path) -> None:
    """A request that comes while a job has many submissions left is served next, and the job goes on."""
    async with serving(tmp_path, slots=1) as service:
        count = 400
        body = b"".join(line(f"# {n}") for n in range(count))
        job_id = (await service.submit(body)).json()["id"]
        waits = []
        for number in range(10):
            before = service.jobs.state("anonymous", job_id).done
            answer = await service.http.post("/v1/grade", content=line(f"# request {number}"))
            assert answer.json()["verdict"] == "accepted"
            waits.append(service.jobs.state("anonymous", job_id).done - before)
        state = service.jobs.state("anonymous", job_id)
        assert state.ended_s is None, "the job is too short for this test"
        assert sorted(waits)[len(waits) // 2] < 20, waits
        assert (await service.finished(job_id))["verdicts"] == {"accepted": count}


async def test_jobs_of_two_clients_share_and_priorities_order_those_of_one(tmp_path: Path) -> None:
    async with serving(tmp_path, slots=1, keys=KEYS) as service:
        ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
        many = b"".join(line(f"# {n}") for n in range(600))
        long = (await service.submit(many, headers=ann)).json()["id"]
        urgent = (await service.submit(b"".join(line(f"# u{n}") for n in range(20)), headers=ann, priority=5)).json()
        other = (await service.submit(b"".join(line(f"# b{n}") for n in range(20)), headers=bob)).json()
        await service.finished(urgent["id"], **ann)
        await service.finished(other["id"], **bob)
        done = service.jobs.state("ann", long).done
        assert done < 500, f"the first job was not passed: {done}"
        for method, path in (("GET", ""), ("GET", "/results"), ("DELETE", "")):
            answer = await service.http.request(method, f"/v1/jobs/{long}{path}", headers=bob)
            assert answer.status_code == 404, "a job of another client"
            assert answer.json()["detail"] == f"there is no job {long}, or it was removed"
        assert len((await service.http.get("/v1/jobs", headers=bob)).json()["jobs"]) == 1
        assert (await service.http.get("/v1/jobs")).status_code == 401


async def test_a_quota_bounds_a_job_and_leaves_room_for_requests(tmp_path: Path) -> None:
    keys = f"ann:{hashlib.sha256(b'ann').hexdigest()}:2"
    async with serving(tmp_path, slots=4, keys=keys) as service:
        service.http.headers["Authorization"] = "Bearer ann"
        job_id = (await service.submit(b"".join(line(f"# {n}") for n in range(60)))).json()["id"]
        for number in range(5):
            answer = await service.http.post("/v1/grade", content=line(f"# request {number}"))
            assert answer.status_code == 200, answer.text
        assert (await service.finished(job_id))["done"] == 60


async def test_a_deleted_job_leaves_nothing_and_frees_its_bytes(tmp_path: Path) -> None:
    async with serving(tmp_path, slots=1, client_bytes=150_000) as service:
        body = b"".join(line(f"# {n} " + "x" * 1000) for n in range(80))
        for _ in range(3):
            sent = await service.submit(body)
            assert sent.status_code == 202, sent.text
            job_id = sent.json()["id"]
            assert (await service.http.delete(f"/v1/jobs/{job_id}")).json()["id"] == job_id
            assert (await service.http.get(f"/v1/jobs/{job_id}")).status_code == 404
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        await service.submit(lines(2))


REFUSED: Iterable[tuple[str, bytes, dict[str, Any], int, str]] = [
    ("no submission", b"\n \n", {}, 422, "body: holds no submission"),
    ("an array", b"[" + line() + b"]", {}, 422, "body: line 1 is not a JSON object"),
    ("a long line", line() + b"{" + b" " * MAX_LINE + b"}\n", {}, 422, f"line 2 has more than {MAX_LINE} bytes"),
    ("too many lines", lines(30), {"client_submissions": 25}, 409, "30 submissions and 0 of the client's"),
    ("too many lines of all", lines(30), {"submissions": 25}, 409, "would have more than 25 submissions"),
    ("too many bytes", lines(30), {"client_bytes": 2000}, 409, "would take more than 2000 bytes; delete one"),
    ("too many bytes of all", lines(30), {"store_bytes": 2000}, 409, "all jobs together would take more than"),
]


@pytest.mark.parametrize(
    ("body", "settings", "status", "detail"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
async def test_what_does_not_fit_is_refused_and_leaves_nothing(
    tmp_path: Path, body: bytes, settings: dict[str, Any], status: int, detail: str
) -> None:
    async with serving(tmp_path, **settings) as service:
        answer = await service.submit(body)
        assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        assert service.budget.held_bytes == 0
        assert (await service.submit(line())).status_code == 202


@pytest.mark.parametrize(
    ("options", "status", "field"),
    [
        ({"priority": 10}, 422, "priority"),
        ({"priority": "high"}, 422, "priority"),
        ({"colour": "red"}, 422, "colour"),
        ({"webhook": "http://127.0.0.1:1/"}, 422, "webhook"),
        ({"kind": "text/csv"}, 415, "Content-Type"),
        ({"headers": {"Idempotency-Key": "k" * 201}}, 422, "Idempotency-Key"),
    ],
)
async def test_an_invalid_option_is_named(tmp_path: Path, options: dict[str, Any], status: int, field: str) -> None:
    async with serving(tmp_path) as service:
        answer = await service.submit(line(), **options)
        assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text


async def test_a_body_larger_than_the_memory_budget_is_streamed_to_the_disk(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        body = b"".join(line(f"# {n} " + "x" * 3000) for n in range(100))  # three times the budget

        async def parts() -> AsyncIterator[bytes]:
            for begin in range(0, len(body), 7000):
                yield body[begin : begin + 7000]

        sent = await service.submit(parts())
        assert sent.status_code == 202, sent.text
        assert (await service.finished(sent.json()["id"]))["done"] == 100


async def test_lines_that_decode_to_more_than_the_memory_budget_are_graded_one_after_the_other(tmp_path: Path) -> None:
    numbers = "[" + "1," * 8_000 + "1]"
    tests = f'{{"type":"call","entry_point":"f","cases":[{{"args":{numbers},"expected":0}}]}}'
    heavy = f'{{"code":"1","tests":{tests}}}\n'.encode()
    assert BYTES_PER_WEIGHT * 8_000 > 3 * 110_000 > 15 * len(heavy)  # the budget, and the line in it
    async with serving(tmp_path, slots=4) as service:
        job = (await service.submit(heavy * 6)).json()
        assert (await service.finished(job["id"]))["done"] == 6
        assert service.budget.held_bytes == 0


async def test_a_client_that_leaves_in_the_middle_of_a_body_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        host, port = str(service.http.base_url.host), service.http.base_url.port
        assert port is not None
        with socket.create_connection((host, port)) as connection:
            head = f"POST /v1/jobs HTTP/1.1\r\nHost: {host}\r\nContent-Type: {NDJSON}\r\nContent-Length: 1000\r\n\r\n"
            connection.sendall(head.encode() + line())
            async with asyncio.timeout(60):
                while len(list(tmp_path.iterdir())) < 2:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while [path.name for path in tmp_path.iterdir()] != ["lock"]:
                await asyncio.sleep(0.01)
        assert (await service.http.get("/v1/jobs")).json() == {"jobs": []}


async def test_a_repeated_request_with_the_same_key_is_the_same_job(tmp_path: Path) -> None:
    async with serving(tmp_path, client_jobs=2) as service:
        key = {"Idempotency-Key": "step 7"}
        first = (await service.submit(lines(3), headers=key)).json()
        again = (await service.submit(lines(3), headers=key)).json()
        assert again["id"] == first["id"]
        await service.submit(lines(3))
        full = await service.submit(lines(3))
        assert (full.status_code, full.json()["detail"]) == (
            409,
            "the client has 2 jobs, the most that are kept; delete one",
        )


async def test_a_request_with_the_key_of_a_job_that_is_being_deleted_waits_and_is_a_new_job(tmp_path: Path) -> None:
    waits = asyncio.Event()
    async with serving(tmp_path) as service:
        removals = service.jobs._store.removals

        async def noted(job_id: str | None = None) -> None:
            waits.set()
            await removals(job_id)

        key = {"Idempotency-Key": "step 7"}
        old = (await service.submit(lines(3), headers=key)).json()
        await service.finished(old["id"])
        (job,) = service.jobs._store
        async with job.lock:  # as when a thread works on its files
            deleting = asyncio.create_task(service.http.delete(f"/v1/jobs/{old['id']}"))
            while [*service.jobs._store]:
                await asyncio.sleep(0.01)
            service.jobs._store.removals = noted  # type: ignore[method-assign]
            sending = asyncio.create_task(service.submit(lines(5), headers=key))
            await waits.wait()
        assert (await deleting).status_code == 200
        sent = await sending
        assert (sent.status_code, sent.json()["id"], sent.json()["total"]) == (202, old["id"], 5), sent.text


async def test_results_that_take_too_many_bytes_end_the_job(tmp_path: Path) -> None:
    async with serving(tmp_path, client_bytes=10_000) as service:
        job_id = (await service.submit(lines(60))).json()["id"]
        state = await service.finished(job_id)
        assert (state["state"], state["detail"]) == (
            "failed",
            "the client's jobs would take more than 10000 bytes; delete one",
        )
        assert 0 < state["done"] < 60


async def test_jobs_are_removed_after_a_while_and_end_when_they_take_too_long(tmp_path: Path) -> None:
    async with serving(tmp_path, slots=1) as service:
        store = service.jobs._store
        done = (await service.submit(lines(2))).json()["id"]
        await service.finished(done)
        begin = service.sandbox.session

        @asynccontextmanager
        async def session(program: Any) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            async with begin(program) as opened:
                yield opened

        service.sandbox.session = session  # type: ignore[method-assign]
        slow = (await service.submit(line("# slow"))).json()["id"]
        store.clock = lambda: time.time() + 3600 * 25
        await service.jobs.sweep()
        assert [job["id"] for job in (await service.http.get("/v1/jobs")).json()["jobs"]] == [slow]
        store.clock = lambda: time.time() + 3600 * 49
        await service.jobs.sweep()
        state = (await service.http.get(f"/v1/jobs/{slow}")).json()
        assert (state["state"], state["detail"]) == ("expired", "not finished within 48 hours")


async def test_rows_of_a_parquet_file_are_submissions(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason=f"pyarrow is missing: {how_to_install('data')}")
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(text) for text in lines(20).splitlines()]
    rows[3]["tests"] = {"inputs": ["a"], "outputs": ["b"]}  # becomes columns of nulls in all other rows
    rows += [{"id": "text", "code": "echo", "tests": {"inputs": ["a"], "outputs": ["a"]}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    async with serving(tmp_path / "jobs") as service:
        sent = await service.submit((tmp_path / "rows.parquet").read_bytes(), PARQUET)
        assert sent.status_code == 202, sent.text
        state = await service.finished(sent.json()["id"])
        assert (state["verdicts"], state["errors"]) == ({"accepted": 11, "wrong_answer": 10}, 0)


@pytest.mark.heavy
async def test_hostile_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason=f"pyarrow is missing: {how_to_install('data')}")
    import pyarrow
    from pyarrow import parquet

    bomb = pyarrow.table({"code": pyarrow.array(["x" * 10_000_000] * 10).dictionary_encode()})
    parquet.write_table(bomb, tmp_path / "bomb.parquet", compression="zstd")
    parquet.write_table(pyarrow.table({"code": [b"\xff"]}), tmp_path / "bytes.parquet")
    good = tmp_path / "good.parquet"
    parquet.write_table(pyarrow.table({"code": ["1"] * 500}), good)
    torn = bytearray(good.read_bytes())
    torn[4:40] = os.urandom(36)
    async with serving(tmp_path / "jobs", client_bytes=1_000_000) as service:
        for body, detail in (
            (b"PAR1", "not a parquet file that can be read"),
            (good.read_bytes()[:-20], "not a parquet file that can be read"),
            (bytes(torn), ""),
            ((tmp_path / "bomb.parquet").read_bytes(), "its submissions have more than 1000000 bytes"),
            ((tmp_path / "bytes.parquet").read_bytes(), "a row is no JSON"),
        ):
            answer = await service.submit(body, PARQUET)
            assert answer.status_code == 422, answer.text
            assert detail in answer.json()["detail"]
        assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["lock"]


class Receiver:
    """A server that answers with the given statuses, one after the other."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.seen: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        return httpx.Response(self.statuses.pop(0), headers={"location": "http://127.0.0.1/"})


async def test_a_webhook_is_told_with_a_signature_and_again_after_a_failure(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    settings: dict[str, Any] = {"webhook_origins": ("https://Trainer.example",), "webhook_key_file": str(key)}
    receiver = Receiver(500, 307, 200)
    async with serving(tmp_path / "jobs", **settings) as service:
        webhooks = service.jobs._webhooks
        assert webhooks is not None
        webhooks._transport = httpx.MockTransport(receiver)
        webhooks._retry = replace(webhooks._retry, wait_s=0.001)
        sent = await service.submit(lines(4), webhook="https://trainer.example/done?x=1")
        job_id = sent.json()["id"]
        async with asyncio.timeout(60):
            while (state := service.jobs.state("anonymous", job_id)).webhook != "delivered":
                await asyncio.sleep(0.01)
        assert [str(request.url) for request in receiver.seen] == ["https://trainer.example/done?x=1"] * 3
        told = receiver.seen[-1]
        seconds = int(told.headers["X-NousCoder-Signature"].split(",")[0].removeprefix("t="))
        assert told.headers["X-NousCoder-Signature"] == signature(b"0123456789abcdef", seconds, told.content)
        assert json.loads(told.content)["verdicts"] == state.verdicts
        for wrong in (
            *("http://trainer.example/", "https://trainer.example:8443/", "https://trainer.example.evil.org/"),
            *("https://u@trainer.example/", "https://evil.org\\@trainer.example/", "file:///etc/passwd", "//x", "["),
        ):
            answer = await service.submit(lines(1), webhook=wrong)
            assert (answer.status_code, answer.json()["field"]) == (422, "webhook"), wrong


async def test_servers_of_one_client_that_do_not_answer_keep_no_other_client_waiting(tmp_path: Path) -> None:
    """Before, four such requests held all places: another client's was sent after their time limit, 20 s later."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    seen: list[str] = []

    async def receiver(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        if request.url.path == "/hangs":
            await asyncio.Event().wait()
        return httpx.Response(200)

    settings: dict[str, Any] = {"webhook_origins": ("https://a",), "webhook_key_file": str(key), "keys": KEYS}
    async with serving(tmp_path / "jobs", **settings) as service:
        webhooks = service.jobs._webhooks
        assert webhooks is not None
        webhooks._transport = httpx.MockTransport(receiver)

        async def told(client: str, path: str, state: str) -> None:
            headers = {"authorization": f"Bearer {client}"}
            job_id = (await service.submit(line(), webhook=f"https://a{path}", headers=headers)).json()["id"]
            async with asyncio.timeout(60):
                while service.jobs.state(client, job_id).webhook != state:
                    await asyncio.sleep(0.01)

        hanging = [asyncio.create_task(told("ann", "/hangs", "delivered")) for _ in range(6)]
        async with asyncio.timeout(60):
            while seen.count("/hangs") < 2:
                await asyncio.sleep(0.01)
        await told("bob", "/fine", "delivered")
        assert seen.count("/hangs") == 2, "a client has two requests at once"
        for task in hanging:
            task.cancel()


def test_origins_have_a_scheme_a_host_and_a_port() -> None:
    assert origin_of("https://Host.example/a") == origin_of("https://host.example:443") == "https://host.example:443"
    assert origin_of("http://[::1]:8080/x") == "http://::1:8080"
    for wrong in ("ftp://a", "https://", "https://a:b@c", "https://a:99999", "https://a b"):
        with pytest.raises(ValueError, match=r"must be|[Pp]ort"):
            origin_of(wrong)


async def test_two_services_do_not_share_a_folder_and_bad_settings_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path):
        with pytest.raises(Unusable, match=r"verifier\.jobs\.folder: another service uses the jobs in"):
            async with serving(tmp_path):
                pytest.fail("the folder is in use")
    short = tmp_path / "short"
    short.write_text("x")
    with pytest.raises(Unusable, match="has less than 16 bytes"):
        async with serving(tmp_path, webhook_origins=("https://a",), webhook_key_file=str(short)):
            pytest.fail("the key is too short")


async def test_a_service_without_a_folder_says_so(tmp_path: Path) -> None:
    sandbox, registry = FakeSandbox(), CollectorRegistry()
    await sandbox.start()
    app = make_app(Grader(sandbox, VerifierMetrics(registry)), registry, DrainState(), MAX_LINE)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://verifier") as http:
        for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs/x"), ("GET", "/v1/jobs/x/results")):
            answer = await http.request(method, path)
            assert (answer.status_code, answer.json()["detail"]) == (
                501,
                "this service keeps no jobs: verifier.jobs.folder is empty",
            )


@pytest.mark.heavy
def test_a_killed_service_process_resumes_its_job(tmp_path: Path) -> None:
    """SIGKILL in the middle of a job, with the real command and real programs: each submission has one right result."""
    count = 120  # so many that a busy machine, which looks seldom, kills twice
    wanted = ["accepted" if n % 2 == 0 else "wrong_answer" for n in range(count)]
    body = b"".join(line(f"print('{'ab'[n % 2]}')  # {n}", id=n) for n in range(count))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--http", f"127.0.0.1:{port}"]
    command += ["--grpc", "127.0.0.1:0", "--set", f"verifier.jobs.folder={tmp_path / 'jobs'}"]
    job_id, kills = "", 0
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        while True:
            with subprocess.Popen(command, stderr=(tmp_path / "log").open("a"), cwd=tmp_path) as process:
                try:
                    _until(functools.partial(_is_ready, http), process)
                    if not job_id:
                        job_id = http.post("/v1/jobs", content=body, headers={"Content-Type": NDJSON}).json()["id"]
                    begun = http.get(f"/v1/jobs/{job_id}").json()["done"]
                    _until(functools.partial(_has_done, http, job_id, min(count, begun + 12)), process)
                    if begun + 12 >= count:
                        _until(functools.partial(_has_ended, http, job_id), process)
                        text = http.get(f"/v1/jobs/{job_id}/results").text
                        break
                finally:
                    process.send_signal(signal.SIGKILL)
                    process.wait(60)
            kills += 1
    assert kills >= 2
    results = [json.loads(each) for each in text.splitlines()]
    assert len(results) == count
    assert [result["verdict"] for result in sorted(results, key=lambda result: int(result["key"]))] == wanted


def _until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 120
    while not holds():
        assert process.poll() is None, "the service has ended"
        assert time.monotonic() < end_s, "the service does not answer"
        time.sleep(0.02)


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _has_done(http: httpx.Client, job_id: str, count: int) -> bool:
    return bool(http.get(f"/v1/jobs/{job_id}").json()["done"] >= count)


def _has_ended(http: httpx.Client, job_id: str) -> bool:
    return http.get(f"/v1/jobs/{job_id}").json()["ended_s"] is not None
