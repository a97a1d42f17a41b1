"""One suite for both grading clients: against a real service, and against answers of an injected transport."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.client import (
    AsyncClient,
    AuthenticationFailed,
    BadRequest,
    Client,
    DeadlinePassed,
    GradeAnswer,
    GradingFailed,
    Overloaded,
    Patience,
    StorageFull,
    TlsFailed,
    UnknownHost,
    Unreachable,
)
from nouscoder.http_server.listener import start_http
from nouscoder.verifier.access.quotas import Quotas
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.run_code import CodeRunner
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

URL = "http://verifier.test"
TESTS = {"type": "stdin", "cases": [{"input": "a", "output": "a"}, {"input": "b", "output": "b"}]}
GOOD = {"verdict": "accepted", "reward": 1.0}
OURS = {"verdict": "internal_error", "reward": None}
Handler = Callable[[httpx.Request], httpx.Response]


class Either:
    """Calls one of the two clients; the synchronous one in a thread."""

    def __init__(self, kind: str, url: str = URL, patience: Patience | None = None, handler: Any = None) -> None:
        transport = None if handler is None else httpx.MockTransport(handler)
        self.is_sync = kind == "sync"
        self.sync = Client(url, patience, transport=transport)
        self.asynchronous = AsyncClient(url, patience, transport=transport)

    async def grade(self, record: Mapping[str, Any], **options: Any) -> GradeAnswer:
        if self.is_sync:
            return await asyncio.to_thread(lambda: self.sync.grade_record(record, **options))
        return await self.asynchronous.grade_record(record, **options)

    async def grade_many(
        self, requests: Iterable[Mapping[str, Any]], limit: int | None = None, **options: Any
    ) -> list[GradeAnswer | GradingFailed]:
        """The first `limit` results; then the iterator is closed."""
        if self.is_sync:
            return await asyncio.to_thread(
                lambda: list(itertools.islice(self.sync.grade_many(requests, **options), limit))
            )
        found: list[GradeAnswer | GradingFailed] = []
        async with contextlib.aclosing(self.asynchronous.grade_many(requests, **options)) as results:  # type: ignore[type-var]
            async for result in results:
                found.append(result)
                if len(found) == limit:
                    break
        return found

    async def stream(self, **options: Any) -> list[dict[str, Any]]:
        if self.is_sync:
            return await asyncio.to_thread(lambda: [dict(event) for event in self.sync.stream(**options)])
        return [dict(event) async for event in self.asynchronous.stream(**options)]

    async def run_code(self, code: str, **options: Any) -> dict[str, Any]:
        if self.is_sync:
            return dict(await asyncio.to_thread(lambda: self.sync.run_code(code, **options)))
        return dict(await self.asynchronous.run_code(code, **options))

    async def close(self) -> None:
        self.sync.close()
        await self.asynchronous.close()


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(kind: str) -> AsyncIterator[Either]:
    """A client of a real service whose programs echo their input."""
    sandbox, registry = FakeSandbox(), CollectorRegistry()
    await sandbox.start()
    grader = Grader(sandbox, VerifierMetrics(registry))
    app = make_app(grader, registry, DrainState(), 100_000, runner=CodeRunner(grader, Quotas()))
    async with AsyncExitStack() as stack:
        either = Either(kind, "http://" + await start_http(app, "127.0.0.1:0", stack))
        stack.push_async_callback(either.close)
        yield either


def answers(*replies: httpx.Response | Exception) -> tuple[Handler, list[httpx.Request]]:
    """(handler, requests seen): gives the replies one after the other; the last one again and again."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        reply = replies[min(len(seen), len(replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)

    return handle, seen


def reply(status: int, record: object = None, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers={k.replace("_", "-"): v for k, v in headers.items()}, json=record or {})


async def test_a_verdict_comes_back_with_its_documented_fields(client: Either) -> None:
    answer = await client.grade({"code": "1", "tests": TESTS})
    assert (answer["verdict"], answer["reward"], answer["passed"], answer["total"]) == ("accepted", 1.0, 2, 2)
    assert set(answer) == set(GradeAnswer.__annotations__)
    wrong = await client.grade({"code": "1", "tests": {"type": "stdin", "cases": [{"input": "a", "output": "b"}]}})
    assert wrong["first_failure"] is not None
    assert wrong["first_failure"]["output"] == "a"


async def test_many_are_graded_in_order_and_a_failure_is_a_result(client: Either) -> None:
    requests: list[dict[str, Any]] = [
        {"code": "1", "tests": {"type": "stdin", "cases": [{"input": str(n), "output": "0"}]}} for n in range(30)
    ]
    requests[7] = {"code": "1", "tests": TESTS, "colour": "red"}
    found = await client.grade_many(iter(requests), at_once=4)
    failure = found.pop(7)
    assert isinstance(failure, BadRequest)
    assert (failure.field, failure.status) == ("colour", 422)
    outputs = []
    for result in found:
        assert not isinstance(result, GradingFailed)
        outputs.append(result["first_failure"]["output"] if result["first_failure"] else "0")
    assert outputs == [str(n) for n in range(30) if n != 7]


async def test_half_of_a_surrogate_pair_and_a_value_without_json_end_no_other_request(client: Either) -> None:
    """json.loads makes such text of an answer that was cut inside an escaped emoji."""
    tests = {"type": "stdin", "cases": [{"input": "0", "output": "0"}]}
    block = "```python\nprint(0)\n```"
    requests: list[dict[str, Any]] = [
        {"completion": text, "tests": tests} for text in (block, f"ok \ud83d\n{block}", f"{block}\udfff", block)
    ]
    found = await client.grade_many([*requests, {"code": b"1", "tests": tests}, *requests[:1]])
    failure = found.pop(4)
    assert isinstance(failure, BadRequest)
    assert [not isinstance(one, GradingFailed) and one["verdict"] for one in found] == ["accepted"] * 5


async def test_grade_many_has_at_once_in_progress_and_reads_only_a_little_ahead(kind: str) -> None:
    at_once, read = 4, itertools.count()
    barrier, meeting = threading.Barrier(at_once), asyncio.Barrier(at_once)

    def meet(request: httpx.Request) -> httpx.Response:
        barrier.wait(60)  # breaks unless `at_once` requests are in progress together
        return reply(200, GOOD)

    async def meet_in_loop(request: httpx.Request) -> httpx.Response:
        await asyncio.wait_for(meeting.wait(), 60)
        return reply(200, GOOD)

    either = Either(kind, handler=meet if kind == "sync" else meet_in_loop)
    found = await either.grade_many(({"code": str(next(read)), "tests": TESTS} for _ in range(32)), at_once=at_once)
    assert [result for result in found if isinstance(result, GradingFailed)] == []
    assert len(found) == 32

    handler, _ = answers(reply(200, GOOD))
    endless = itertools.count()
    either = Either(kind, handler=handler)
    first = await either.grade_many(({"code": str(n), "tests": TESTS} for n in endless), limit=3, at_once=at_once)
    assert len(first) == 3
    assert next(endless) <= 4 * at_once + 3


async def test_a_stream_gives_each_outcome_then_the_verdict(client: Either) -> None:
    events = await client.stream(code="1", tests=TESTS)
    assert ["verdict" in event for event in events] == [False, False, True]
    assert {event["index"] for event in events[:2]} == {0, 1}
    assert events[2]["verdict"] == "accepted"
    with pytest.raises(BadRequest, match="colour"):
        await client.stream(code="1", tests=TESTS, colour="red")


async def test_a_stream_that_breaks_off_is_no_verdict(kind: str) -> None:
    half = b'event: outcome\ndata: {"index": 0, "outcome": "accepted"}\n\n'
    late = half + b'event: fault\ndata: {"detail": "the deadline of 1 s has passed", "field": "X-Deadline-S"}\n\n'
    for content, error in ((half, Unreachable), (late, DeadlinePassed)):
        handler, seen = answers(httpx.Response(200, content=content))
        with pytest.raises(error):
            await Either(kind, handler=handler).stream(code="1", tests=TESTS)
        assert len(seen) == 1
    handler, seen = answers(
        reply(503), httpx.Response(200, content=b'event: verdict\ndata: {"verdict": "accepted"}\n\n')
    )
    assert await Either(kind, handler=handler).stream(code="1", tests=TESTS) == [{"verdict": "accepted"}]
    assert len(seen) == 2


async def test_a_program_runs_once_with_its_input(client: Either) -> None:
    answer = await client.run_code("print(input())", stdin="hello", run_timeout_s=5, files={"a": b"\x00"})
    assert (answer["status"], answer["run_result"]["stdout"]) == ("Success", "hello")
    with pytest.raises(BadRequest) as refused:
        await client.run_code("1", fetch=["../a"])
    assert refused.value.field == "fetch_files"
    with pytest.raises(BadRequest) as refused:
        await client.run_code("1", language="cobol")
    assert refused.value.field == "language"


async def test_a_run_without_a_slot_and_a_broken_sandbox_are_tried_again(kind: str) -> None:
    good = {"status": "Success"}
    handler, seen = answers(
        reply(504, {"detail": "the queue is full"}), reply(200, {"status": "SandboxError"}), reply(200, good)
    )
    assert await Either(kind, handler=handler).run_code("1") == good
    assert len(seen) == 3


async def test_the_request_id_and_the_deadline_are_sent(kind: str) -> None:
    handler, seen = answers(reply(200, GOOD))
    await Either(kind, handler=handler).grade({"code": "1", "tests": TESTS}, request_id="step-7/3", deadline_s=30)
    assert seen[0].headers["x-request-id"] == "step-7/3"
    assert 0 < float(seen[0].headers["x-deadline-s"]) <= 30
    assert json.loads(seen[0].content) == {"code": "1", "tests": TESTS}
    handler, seen = answers(reply(422, {"detail": "no", "field": "code"}, X_Request_Id="of-the-service"))
    with pytest.raises(BadRequest) as refused:
        await Either(kind, handler=handler).grade({"code": "1", "tests": TESTS})
    assert refused.value.request_id == "of-the-service"


async def test_a_deadline_bounds_the_call_with_its_retries(kind: str) -> None:
    late = {"detail": "the deadline of 1 s has passed", "field": "X-Deadline-S"}
    for answer in (reply(504, late), reply(429, {"detail": "full"}, Retry_After="60")):
        handler, seen = answers(answer)
        with pytest.raises(DeadlinePassed, match="deadline"):
            await Either(kind, handler=handler).grade({"code": "1", "tests": TESTS}, deadline_s=30)
        assert len(seen) == 1
    handler, seen = answers(httpx.ConnectError("refused"))
    with pytest.raises(DeadlinePassed, match="deadline"):
        await Either(kind, handler=handler).grade({"code": "1", "tests": TESTS}, deadline_s=0.05)
    assert len(seen) <= 1


def caused_by(cause: Exception) -> httpx.ConnectError:
    """As httpx raises it: the cause is two errors deep."""
    error, middle = httpx.ConnectError("failed"), OSError("in between")
    error.__cause__, middle.__context__ = middle, cause
    return error


PERMANENT: list[tuple[httpx.Response | Exception, type[GradingFailed], str]] = [
    (reply(401, {"detail": "a valid API key is required"}), AuthenticationFailed, "API key"),
    (reply(403, {"detail": "host: a service without tokens"}), AuthenticationFailed, "403"),
    (reply(413, {"detail": "body: too large", "field": "body"}), BadRequest, "body"),
    (reply(422, {"detail": "code: missing", "field": "code"}), BadRequest, "code: missing"),
    (reply(404, {"detail": "Not Found"}), BadRequest, "404"),
    (reply(507, {"detail": "full"}), StorageFull, "507"),
    (reply(409, {"detail": "the client has 16 jobs", "field": "body"}), StorageFull, "16 jobs"),
    (reply(409, {"detail": "is being received", "field": "Idempotency-Key"}), BadRequest, "received"),
    (reply(418, {"detail": "teapot"}), GradingFailed, "418"),
    (httpx.Response(200, text="<html>a proxy</html>"), GradingFailed, "not the grading API"),
    (caused_by(ssl.SSLCertVerificationError("self-signed certificate")), TlsFailed, "self-signed"),
    (caused_by(socket.gaierror(socket.EAI_NONAME, "Name or service not known")), UnknownHost, "host name"),
    (caused_by(ExceptionGroup("both", [socket.gaierror(socket.EAI_NONAME, "unknown")])), UnknownHost, "host name"),
    (httpx.ReadTimeout("660 s"), DeadlinePassed, "in time"),
]


@pytest.mark.parametrize(("failure", "error", "message"), PERMANENT, ids=[str(row[2]) for row in PERMANENT])
async def test_a_permanent_error_is_raised_at_once_with_its_class(
    kind: str, failure: httpx.Response | Exception, error: type[GradingFailed], message: str
) -> None:
    handler, seen = answers(failure)
    with pytest.raises(error, match=message) as raised:
        await Either(kind, handler=handler).grade({"code": "1", "tests": TESTS})
    tried = [request.url.path for request in seen]
    assert tried == ["/v1/grade", "/v1/tests"][: 2 if raised.value.status == 413 else 1], "a 413: it stores the tests"
    assert not raised.value.is_passing
    assert raised.value.status == (failure.status_code if isinstance(failure, httpx.Response) else 0)


async def test_an_url_without_a_scheme_is_a_bad_request(kind: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await Either(kind, "127.0.0.1:8080").grade({"code": "1", "tests": TESTS})
    assert refused.value.field == "url"


@pytest.mark.parametrize(
    "failure",
    [
        reply(429, {"detail": "full"}, Retry_After="0"),
        reply(503, {"detail": "draining"}),
        reply(502, {"detail": "proxy"}),
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        caused_by(ssl.SSLEOFError("cut during the handshake")),
        caused_by(socket.gaierror(socket.EAI_AGAIN, "try again")),
    ],
    ids=lambda failure: str(failure)[:40],
)
async def test_a_passing_error_is_retried_until_its_limit(kind: str, failure: httpx.Response | Exception) -> None:
    handler, seen = answers(failure, reply(200, GOOD))
    assert (await Either(kind, handler=handler).grade({"code": "1", "tests": TESTS}))["verdict"] == "accepted"
    assert len(seen) == 2
    handler, seen = answers(failure)
    impatient = Patience(busy_s=0.01, unreachable_s=0.01)
    with pytest.raises(Overloaded if isinstance(failure, httpx.Response) else Unreachable) as raised:
        await Either(kind, patience=impatient, handler=handler).grade({"code": "1", "tests": TESTS})
    assert len(seen) == 2
    assert raised.value.is_passing


async def test_an_internal_error_is_retried_twice_and_then_returned(kind: str) -> None:
    handler, seen = answers(reply(200, OURS))
    answer = await Either(kind, handler=handler).grade({"code": "1", "tests": TESTS})
    assert (answer["verdict"], answer["reward"], len(seen)) == ("internal_error", None, 3)


def test_a_misspelt_field_is_found_by_the_type_checker_and_by_the_service() -> None:
    """`make check` fails when mypy does not find it, because an ignored error that is none is an error."""
    handler, _ = answers(reply(422, {"detail": "test: unknown field", "field": "test"}))
    with Client(URL, transport=httpx.MockTransport(handler)) as client, pytest.raises(BadRequest):
        client.grade(code="1", test=TESTS)  # type: ignore[call-arg]
    with Client(URL, transport=httpx.MockTransport(handler)) as client, pytest.raises(BadRequest):
        client.grade(code="1", tests=TESTS, limits={"wall_time": 1.0})  # type: ignore[typeddict-unknown-key]


def test_the_synchronous_client_is_made_from_the_asyncio_one() -> None:
    script = Path(__file__).parents[2] / "deploy" / "sync-client"
    done = subprocess.run([sys.executable, script, "check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
