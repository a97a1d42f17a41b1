"""Tests that are too large for a request: PUT /v1/tests converts them case by case, and the clients use it themselves.

Tests the invariants of tests_upload.py, sent_tests.py and client/calls.py.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.client import AsyncClient, BadRequest, Client, StorageFull
from nouscoder.client import calls as calls_of_client
from nouscoder.config import TestsSection
from nouscoder.formats.body import canonical_json, digest_of
from nouscoder.formats.json_values import MAX_WEIGHT
from nouscoder.formats.sent_tests import NotTests, sent_tests
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.store.blobs import FolderBlobs
from nouscoder.store.case_files import write_tests
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.access.stored_tests import ClientTests, StoredTestsGrader
from nouscoder.verifier.api import tests_upload
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.schema import parse_tests
from nouscoder.verifier.api.tests_upload import convert
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

CALL = {"args": [[1, 1.5, None, True, "é", 1 << 70]], "kwargs": {"a": {}}, "expected": [3]}
FORMS: dict[str, dict[str, Any]] = {
    "stdin": {
        "type": "stdin",
        "cases": [{"input": "1\n", "output": "2", "args": ["-x"]}, {"input": '}]é\\"', "output": ""}],
    },
    "the cases first": {"cases": [CALL] * 5, "entry_point": "f", "type": "call"},
    "asserts": {"type": "assert", "setup": "import math", "cases": ["assert f([1])", "assert f({})"]},
    "a checker, and nulls": {
        "type": "checker",
        "checker": {"code": "x", "language": "cpp", "protocol": "kattis"},
        "cases": [{"input": "1", "output": "2", "args": None}],
        "fn_name": None,
    },
    "pairs of lines": {"inputs": ["1\n2", "3\n4"], "outputs": ["[1]", "[2]"], "fn_name": "f"},
    "results in lists": {"inputs": [[1], [2]], "outputs": [[1], [2]], "fn_name": "Solution.f"},
    "results that are lists": {"inputs": [[1], [2]], "outputs": [[1], [2, 3]], "fn_name": "f"},
    "runs": {"inputs": ["1", "2"], "outputs": [["a", "b"], "c"]},
    "Atropos": {"input": ["1", "2"], "output": ["a", "b"]},
    "math": {"type": "math", "cases": [{"expected": "1/2"}]},
}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_tests_is_read_like_a_body(form: str, indent: int | None) -> None:
    text = json.dumps(FORMS[form], indent=indent).encode()
    wanted, found = parse_tests(text), sent_tests(text, 10)
    assert type(found) is type(wanted)
    assert canonical_json(found) == canonical_json(wanted)


CASE = '{"input":"","output":""}'
STDIN = '{"type":"stdin","cases":[' + CASE
REFUSED = {
    "": "body",
    "{": "body",
    "[]": "body",
    '{"a"}': "body",
    '{"a":}': "body",
    "{a:1}": "body",
    '{"cases":[[[': "body",
    STDIN + "]} x": "body",
    STDIN + ",]}": "body",
    STDIN + CASE + "]}": "body",
    STDIN + "]]": "body",
    STDIN[:-1] + ',"a":[1}}]}': "tests.cases[0]",
    '{"type":"stdin"}': "tests.cases",
    '{"type":"stdin","cases":[]}': "tests.cases",
    '{"type":"x","cases":[1]}': "tests.type",
    STDIN + ',{"input":1,"output":""}]}': "tests.cases[1].input",
    '{"inputs":[1],"outputs":[]}': "tests.inputs",
    STDIN + 10 * ("," + CASE) + "]}": "tests.cases",
    '{"type":"call","entry_point":"f","cases":[{"args":[' + "1," * MAX_WEIGHT + '1],"expected":0}]}': "tests.cases[0]",
    '{"inputs":["' + "1,2" * MAX_WEIGHT + '"],"outputs":["1"],"fn_name":"f"}': "tests.cases[0]",
    '{"type":"checker","checker":{"code":"' + "x" * (1 << 20) + '"},"cases":[1]}': "tests",
}


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_holds_no_tests_is_refused(text: str) -> None:
    with pytest.raises(NotTests) as refused:
        canonical_json(sent_tests(text.encode(), 10))
    assert refused.value.field == REFUSED[text]
    assert len(str(refused.value)) < 300


def test_one_case_at_a_time_is_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read: list[int] = []

    def counted(self: Any, index: int) -> Any:
        read.append(index)
        return tests_of(self, index)

    tests = sent_tests(json.dumps(FORMS["the cases first"]).encode(), 10)
    tests_of = type(tests.cases).tests_of  # type: ignore[union-attr]
    monkeypatch.setattr(type(tests.cases), "tests_of", counted)
    with (tmp_path / "file").open("xb") as file:
        write_tests(tests, file)
    assert read == [0, 1, 2, 3, 4]


@dataclass
class Service:
    url: str
    budget: MemoryBudget
    grader: StoredTestsGrader


CLIENT_BYTES = 12 << 20


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TestsCache]:
    cache = TestsCache(tmp_path / "cache", 1 << 28)
    yield cache
    cache.close()


@pytest.fixture
async def service(tmp_path: Path, cache: TestsCache, temporary: Path) -> AsyncIterator[Service]:
    """REST with a limit of 2000 bytes for a body, and programs that echo their input."""
    sandbox, budget = FakeSandbox({}, num_slots=1), MemoryBudget(8 << 20)
    await sandbox.start()
    section = TestsSection(client_bytes=CLIENT_BYTES, expiry_s=1000.0, store_bytes=1 << 28)
    client_tests = ClientTests(FolderBlobs(tmp_path / "store"), cache, section)
    grader = StoredTestsGrader(Grader(sandbox, VerifierMetrics(CollectorRegistry())), client_tests)
    app = make_app(grader, CollectorRegistry(), DrainState(), 2000, client_tests=client_tests, budget=budget)
    async with AsyncExitStack() as stack:
        address = await start_http(app, "127.0.0.1:0", stack)
        yield Service(f"http://{address}", budget, grader)
        assert list(temporary.iterdir()) == [], "nothing stays on the disk"
        assert budget.held_bytes == 0


def sized(num_bytes: int) -> dict[str, Any]:
    """Tests that an echo passes, of at least so many bytes."""
    text = "x" * (num_bytes // 8)
    return {"type": "stdin", "cases": [{"input": f"{at}{text}", "output": f"{at}{text}"} for at in range(4)]}


async def test_tests_of_any_size_are_stored_within_little_memory_and_graded_by_their_digest(service: Service) -> None:
    """The body is larger than all requests may hold together."""
    tests = sized(10 << 20)
    most, add = 0, MemoryBudget.take

    def noted(budget: MemoryBudget, num_bytes: int, *, always: bool = False) -> None:
        nonlocal most
        add(budget, num_bytes, always=always)
        most = max(most, budget.held_bytes)

    async with httpx.AsyncClient(base_url=service.url, timeout=120) as http:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryBudget, "take", noted)
            stored = await http.put("/v1/tests", json=tests)
        assert stored.status_code == 200, stored.text
        assert stored.json()["digest"] == digest_of(parse_tests(json.dumps(tests).encode()))
        assert 0 < most < 2 << 20
        request = {"code": "cat", "tests": {"digest": stored.json()["digest"]}}
        answer = (await http.post("/v1/grade", json=request)).json()
        assert (answer["verdict"], answer["total"]) == ("accepted", 4)
        refused = await http.post("/v1/grade", json={"code": "cat", "tests": tests})
        assert refused.status_code == 413
        assert "PUT /v1/tests" in refused.json()["detail"]


async def test_a_refusal_has_a_reason_and_a_cut_body_leaves_nothing(
    service: Service, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tests_upload, "MAX_BODY_BYTES", 60_000)

    async def chunks(text: bytes) -> AsyncIterator[bytes]:
        yield text

    async with httpx.AsyncClient(base_url=service.url, timeout=120) as http:
        for text, status, field in (
            (b" " * 3000 + b"{", 422, "body"),
            (b"", 422, "body"),
            (b" " * 3000 + b'{"type":"stdin","cases":[{"input":1,"output":""}]}', 422, "tests.cases[0].input"),
            (b" " * 3000 + b'{"type":"call","entry_point":"a b","cases":[{"expected":1}]}', 422, "tests.entry_point"),
            (b" " * 70_000, 422, "body"),
        ):
            answer = await http.put("/v1/tests", content=chunks(text))
            assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PUT /v1/tests HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\n" + b" " * 50_000)
    async with asyncio.timeout(60):
        while not list(temporary.iterdir()):
            await asyncio.sleep(0.01)
        writer.close()
        while service.budget.held_bytes or list(temporary.iterdir()):
            await asyncio.sleep(0.01)


async def test_a_client_has_one_body_on_the_disk_at_a_time(service: Service, temporary: Path) -> None:
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(list(temporary.iterdir())))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    async with httpx.AsyncClient(base_url=service.url, timeout=120) as http:
        answers = await asyncio.gather(*(http.put("/v1/tests", json=sized(4000 + at)) for at in range(3)))
        watching.cancel()
        assert {answer.status_code for answer in answers} == {200}
        assert most == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tests_upload, "MAX_BYTES_ON_DISK", 3000)
            busy = await http.put("/v1/tests", json=sized(4000))
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "5")


async def test_the_process_that_converts_is_limited(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    text = json.dumps(FORMS["stdin"]).encode()
    tests, digest = await tests_upload.tests_of_message(text)
    assert (digest, canonical_json(tests)) == (digest_of(parse_tests(text)), canonical_json(parse_tests(text)))
    monkeypatch.setattr(tests_upload, "_PATIENCE_S", 0.01)
    with pytest.raises(InvalidSubmission, match="limits of memory and time"):
        await tests_upload.tests_of_message(text)
    assert list(temporary.iterdir()) == []


def test_a_file_with_very_many_values_in_all_is_converted(tmp_path: Path) -> None:
    """More than a body may have, less in each call."""
    source, target = tmp_path / "body", tmp_path / "tests"
    case = f'{{"args":[[{"1," * (MAX_WEIGHT // 2)}1]],"expected":0}}'
    source.write_text(f'{{"type":"call","entry_point":"f","cases":[{",".join([case] * 3)}]}}')
    assert convert(source, target)["num_tests"] == 3


class Uploads:
    """Counts the requests to a path."""

    def __init__(self) -> None:
        self.num = 0

    async def note(self, request: httpx.Request) -> None:
        """A hook of httpx."""
        self.num += request.method == "PUT"


@pytest.mark.parametrize("inline_bytes", [1500, 8 << 20], ids=["the client knows", "the service answers 413"])
async def test_the_clients_store_large_tests_themselves_and_once(
    service: Service, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr("nouscoder.client.async_client.INLINE_BYTES", inline_bytes)
    monkeypatch.setattr("nouscoder.client.sync_client.INLINE_BYTES", inline_bytes)
    tests, uploads = sized(3000), Uploads()
    async with AsyncClient(service.url) as client:
        client._http.event_hooks = {"request": [uploads.note]}
        answers = [one async for one in client.grade_many([{"code": "cat", "tests": tests}] * 9)]
        assert [one["verdict"] for one in answers] == ["accepted"] * 9  # type: ignore[index]
        assert uploads.num == 1
        events = [event async for event in client.stream(code="cat", tests=json.dumps(tests))]
        assert events[-1]["verdict"] == "accepted"  # type: ignore[typeddict-item]
        small = await client.grade(code="cat", tests=sized(100))
        assert small["verdict"] == "accepted"
        with pytest.raises(BadRequest) as refused:
            await client.grade(code="#" * 3000, tests={"type": "stdin", "cases": [{"input": "", "output": ""}]})
        assert refused.value.status == 413

    def in_a_thread() -> tuple[str, str]:
        with Client(service.url) as blocking:
            *_, last = blocking.stream(code="cat", tests=tests)
            return blocking.grade(code="cat", tests=tests)["verdict"], last["verdict"]  # type: ignore

    assert await asyncio.to_thread(in_a_thread) == ("accepted", "accepted")


async def test_tests_that_the_service_has_deleted_are_stored_again(service: Service, tmp_path: Path) -> None:
    tests = sized(3000)
    async with AsyncClient(service.url) as client:
        assert (await client.grade(code="cat", tests=tests))["verdict"] == "accepted"
        (known,) = client._digests._digests
        client._digests._digests[known] = "sha256:" + "0" * 64
        body = await client._body({"code": "cat", "tests": tests}, Any, stores=True)  # type: ignore[arg-type]
        assert b"0" * 64 in body
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nouscoder.client.async_client.INLINE_BYTES", 1500)
            assert (await client.grade(code="cat", tests=tests))["verdict"] == "accepted"
        assert client._digests._digests[known] != "sha256:" + "0" * 64


async def test_tests_for_which_there_is_no_room_are_an_error_of_storage(service: Service) -> None:
    async with AsyncClient(service.url) as client:
        with pytest.raises(StorageFull):
            await client.grade(code="cat", tests=sized(CLIENT_BYTES + 1000))


def test_a_client_forgets_the_oldest_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_of_client, "_MOST_KEPT", 2)
    digests = calls_of_client.StoredDigests()
    for number in range(3):
        digests.keep(str(number).encode(), str(number))
    assert [digests.of(str(number).encode()) for number in range(3)] == [None, "1", "2"]


async def test_the_lines_of_a_job_name_large_tests_by_their_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nouscoder.client.async_client.INLINE_BYTES", 1500)
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"digest": "sha256:1", "id": "job"})

    large, small = {"code": "1", "tests": sized(3000)}, {"code": "1", "tests": sized(100)}
    async with AsyncClient("http://service", transport=httpx.MockTransport(answer)) as client:
        await client.submit_job([large, small, large])
    assert [request.url.path for request in seen] == ["/v1/tests", "/v1/jobs"]
    named = {"code": "1", "tests": {"digest": "sha256:1"}}
    assert [json.loads(line) for line in seen[1].content.splitlines()] == [named, small, named]
