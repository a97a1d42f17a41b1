"""Tests that clients store: named by digest in every API, usable only by their client, bounded in bytes and time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from nouscoder.client import AsyncClient, Client, GradingFailed
from nouscoder.config import TestsSection
from nouscoder.domain.submission import StdinCase, StdinTests, Submission, TestsReference
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.body import canonical_json, digest_of
from nouscoder.http_server.listener import start_http
from nouscoder.store.blobs import BlobInfo, FolderBlobs
from nouscoder.store.tests import UnknownTests
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.access.caller import Caller, set_caller
from nouscoder.verifier.access.stored_tests import ClientTests, StorageFull, StoredTestsGrader
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

TESTS = StdinTests((StdinCase("a", "a"), StdinCase("b", "b")))
SIZE = len(canonical_json(TESTS))


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._time = time.time

    def __call__(self) -> float:
        return self._time() + self.ahead_s


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TestsCache]:
    cache = TestsCache(tmp_path / "cache", 10_000_000)
    yield cache
    cache.close()


def stored_in(
    tmp_path: Path,
    cache: TestsCache,
    clock: Clock | None = None,
    max_bytes: int = 10_000,
    store_bytes: int = 100_000,
) -> ClientTests:
    section = TestsSection(client_bytes=max_bytes, expiry_s=1000.0, store_bytes=store_bytes)
    return ClientTests(FolderBlobs(tmp_path / "store"), cache, section, clock or Clock())


async def new_grader(client_tests: ClientTests) -> StoredTestsGrader:
    sandbox = FakeSandbox({}, num_slots=1)
    await sandbox.start()
    return StoredTestsGrader(Grader(sandbox, VerifierMetrics(CollectorRegistry())), client_tests)


async def test_a_client_grades_by_digest_and_cannot_use_digests_of_other_clients(
    tmp_path: Path, cache: TestsCache
) -> None:
    """The invariant of quotas.py."""
    client_tests = stored_in(tmp_path, cache)
    grader = await new_grader(client_tests)
    digest = (await client_tests.put("one", TESTS)).digest
    submission = Submission(TestsReference(digest), "cat")
    set_caller(Caller("one"))
    assert (await grader.grade(submission)).kind is VerdictKind.ACCEPTED
    set_caller(Caller("two"))
    with pytest.raises(InvalidSubmission, match=r"tests\.digest: .* names no tests that this client has stored"):
        await grader.grade(submission)
    await client_tests.put("two", TESTS)
    assert (await grader.grade(submission)).kind is VerdictKind.ACCEPTED


async def test_another_replica_can_use_stored_tests(tmp_path: Path, cache: TestsCache) -> None:
    digest = (await stored_in(tmp_path, cache).put("one", TESTS)).digest
    async with stored_in(tmp_path, cache).opened("one", digest) as tests:
        assert tests.cases[1] == TESTS.cases[1]


async def test_tests_that_another_replica_has_just_stored_are_found(tmp_path: Path, cache: TestsCache) -> None:
    """Processes of one service are replicas, and a client's next request may come to another one."""
    here, replica = stored_in(tmp_path, cache), stored_in(tmp_path, cache)
    with pytest.raises(UnknownTests):
        async with here.opened("one", f"sha256:{'0' * 64}"):
            pass
    digest = (await replica.put("one", TESTS)).digest
    async with here.opened("one", digest) as tests:
        assert tests.cases[1] == TESTS.cases[1]


async def test_a_clients_bytes_are_bounded_and_equal_tests_count_once(tmp_path: Path, cache: TestsCache) -> None:
    client_tests = stored_in(tmp_path, cache, max_bytes=2 * SIZE)
    for _ in range(3):
        await client_tests.put("one", TESTS)
    other = StdinTests((StdinCase("x", "y"), StdinCase("z", "w")))
    assert (await client_tests.put("one", other)).num_bytes == SIZE
    with pytest.raises(StorageFull, match=f"{2 * SIZE} are stored, and a client may store {2 * SIZE}"):
        await client_tests.put("one", StdinTests((StdinCase("1", "2"),)))
    await client_tests.put("two", StdinTests((StdinCase("1", "2"),)))


async def test_the_bytes_of_all_clients_are_bounded(tmp_path: Path, cache: TestsCache) -> None:
    file_bytes = (await stored_in(tmp_path, cache).put("one", TESTS)).file_bytes
    client_tests = stored_in(tmp_path, cache, store_bytes=file_bytes + 1)
    await client_tests.put("two", TESTS)  # the same file
    with pytest.raises(StorageFull, match=f"all clients' tests take {file_bytes}, and the store may hold"):
        await client_tests.put("two", StdinTests((StdinCase("1", "2"),)))
    files = [path for path in (tmp_path / "store" / "stored").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) == file_bytes


class CountingBlobs(FolderBlobs):
    """A folder that counts the names that it has listed."""

    num_listed = 0

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        for info in super().list(prefix):
            self.num_listed += 1
            yield info


async def test_the_work_of_storing_does_not_grow_with_the_store(tmp_path: Path, cache: TestsCache) -> None:
    blobs = CountingBlobs(tmp_path / "store")
    now = time.time()
    client_tests = ClientTests(blobs, cache, TestsSection(client_bytes=1_000_000, expiry_s=1000.0), lambda: now)
    for number in range(20):
        await client_tests.put(f"client-{number % 2}", StdinTests((StdinCase(str(number), ""),)))
    assert blobs.num_listed == 0  # both lists were read before anything was in them


async def test_a_sweep_counts_what_another_replica_stored_and_what_was_deleted(
    tmp_path: Path, cache: TestsCache
) -> None:
    file_bytes = (await stored_in(tmp_path, cache).put("one", TESTS)).file_bytes
    clock, other = Clock(), StdinTests((StdinCase("1", "2"),))
    here = stored_in(tmp_path / "here", cache, clock, store_bytes=file_bytes + 1)
    replica = stored_in(tmp_path / "here", cache, clock, store_bytes=file_bytes + 1)
    here.sweep()
    await replica.put("two", TESTS)
    here.sweep()
    with pytest.raises(StorageFull, match=f"all clients' tests take {file_bytes}"):
        await here.put("one", other)
    clock.ahead_s = 3700.0
    here.sweep()
    await here.put("one", other)


async def test_tests_expire_after_their_last_use_and_are_then_deleted(tmp_path: Path, cache: TestsCache) -> None:
    clock = Clock()
    client_tests = stored_in(tmp_path, cache, clock)
    digest = (await client_tests.put("one", TESTS)).digest
    clock.ahead_s = 1100.0
    with pytest.raises(UnknownTests, match="expired"):
        async with client_tests.opened("one", digest):
            pass
    clock.ahead_s = 3700.0
    client_tests.sweep()
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


async def test_a_sweep_keeps_the_tests_of_a_client(tmp_path: Path, cache: TestsCache) -> None:
    client_tests = stored_in(tmp_path, cache)
    digest = (await client_tests.put("one", TESTS)).digest
    client_tests.sweep()
    async with client_tests.opened("one", digest) as tests:
        assert tests.cases[0] == TESTS.cases[0]


@pytest.fixture
async def http(tmp_path: Path, cache: TestsCache) -> TestClient:
    client_tests = stored_in(tmp_path, cache, max_bytes=1000)
    grader = await new_grader(client_tests)
    app = make_app(grader, CollectorRegistry(), DrainState(), 2000, client_tests=client_tests)
    return TestClient(app)


def test_put_then_grade_stream_and_batch_over_rest(http: TestClient) -> None:
    stored = http.put("/v1/tests", content=canonical_json(TESTS))
    assert stored.json() == {"digest": digest_of(TESTS), "num_tests": 2, "num_bytes": SIZE}
    request: dict[str, Any] = {"code": "cat", "tests": {"digest": stored.json()["digest"]}}
    assert http.post("/v1/grade", json=request).json()["verdict"] == "accepted"
    assert "event: verdict" in http.post("/v1/grade/stream", json=request).text
    lines = json.dumps(request) + "\n" + json.dumps(request | {"tests": {"digest": "sha256:" + "0" * 64}}) + "\n"
    answers = [json.loads(line) for line in http.post("/v1/grade/batch", content=lines).text.splitlines()]
    assert {one["id"]: one.get("verdict", one.get("field")) for one in answers} == {0: "accepted", 1: "tests.digest"}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"x" * 3000, 422, "body"),
        (b"{", 422, "body"),
        (b'{"type": "stdin", "cases": []}', 422, "tests.cases"),
        (b'{"type": "stdin", "cases": [{"input": 1, "output": ""}]}', 422, "tests.cases[0].input"),
        (
            b'{"type": "interactive", "cases": [{"input": ""}], "interactor": {"code": "0", "language": "AAA"}}',
            422,
            "tests.interactor.language",
        ),
        (b'{"type": "call", "entry_point": "a b", "cases": [{"args": [], "expected": 1}]}', 422, "tests.entry_point"),
        (b'{"type": "stdin", "cases": [{"input": "' + b"x" * 1500 + b'", "output": ""}]}', 409, "tests"),
    ],
)
def test_a_refusal_has_a_reason(http: TestClient, body: bytes, status: int, field: str) -> None:
    answer = http.put("/v1/tests", content=body)
    assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text


async def test_the_client_stores_tests_and_grades_by_their_digest(tmp_path: Path, cache: TestsCache) -> None:
    """Uses both clients of the package with a service on a port."""
    client_tests = stored_in(tmp_path, cache, max_bytes=SIZE)
    grader = await new_grader(client_tests)
    app = make_app(grader, CollectorRegistry(), DrainState(), 2000, client_tests=client_tests)
    tests, others = json.loads(canonical_json(TESTS)), {"type": "stdin", "cases": [{"input": "x", "output": "y"}]}
    async with AsyncExitStack() as stack:
        url = "http://" + await start_http(app, "127.0.0.1:0", stack)
        client = await stack.enter_async_context(AsyncClient(url))
        digest = await client.put_tests(tests)
        assert digest == digest_of(TESTS)
        assert (await client.grade(code="cat", tests={"digest": digest}))["verdict"] == "accepted"
        with pytest.raises(GradingFailed, match=r"HTTP 409: these tests have .* a client may store") as full:
            await client.put_tests(others)
        assert full.value.status == 409

        def in_a_thread() -> tuple[str, str]:
            with Client(url) as blocking:
                digest = blocking.put_tests(tests)
                return digest, blocking.grade(code="cat", tests={"digest": digest})["verdict"]

        assert await asyncio.to_thread(in_a_thread) == (digest, "accepted")


@pytest.mark.parametrize("digest", ["sha256:" + "0" * 64, "sha256:0", "nope"])
def test_a_digest_that_is_unknown_is_422(http: TestClient, digest: str) -> None:
    answer = http.post("/v1/grade", json={"code": "cat", "tests": {"digest": digest}})
    assert (answer.status_code, answer.json()["field"]) == (422, "tests.digest")
