"""The service over sockets: REST and gRPC give the same verdicts, and a full queue and a drain are reported."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import httpx
import pytest
from google.protobuf import text_format
from prometheus_client import CollectorRegistry

from nouscoder.client import AsyncClient, GradingFailed, Patience
from nouscoder.config import VerifierSection
from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.rpc.addresses import AddressError
from nouscoder.rpc.channel import open_channel
from nouscoder.rpc.pairs import SUBMISSION, VERDICT
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.v1 import verdict_pb2, verifier_pb2, verifier_pb2_grpc
from nouscoder.verifier.access.grpc_gate import GrpcGate
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.servicer import FULL_NAME, STATUS_CODES, Servicer
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import NO_FILES, Dialogue, Exit, Program, RunResult, Sandbox, SandboxError, Session

GOOD = RunResult(Exit.EXITED, 0, 0, 0.01, 0.01, 1000, b"", b"")
MAX_BODY = 200_000


class WordSandbox(Sandbox):
    """Programs of one word: `cat` prints its input, `hang` waits for an event, `break` breaks the sandbox."""

    name = "words"
    isolation: tuple[str, ...] = ()
    num_slots = 2

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.hangs_on = b""
        self.open = 0

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    @asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[Session]:
        """One submission."""
        self.open += 1
        try:
            yield _WordSession(self, program.code)
        finally:
            self.open -= 1

    def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AbstractAsyncContextManager[tuple[Session, ...]]:
        """Not used by these tests."""
        raise NotImplementedError

    def dialogue(self, program: Program) -> AbstractAsyncContextManager[Dialogue]:
        """Not used by these tests."""
        raise NotImplementedError


@dataclass
class _WordSession:
    sandbox: WordSandbox
    code: str

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        if self.code == "break":
            raise SandboxError("broken")
        if self.code == "hang" or (stdin and stdin == self.sandbox.hangs_on):
            await self.sandbox.let_go.wait()
        return replace(GOOD, stdout=stdin)

    async def dialogue_with(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        raise NotImplementedError


@dataclass
class Running:
    """A service in this event loop."""

    sandbox: WordSandbox
    grader: Grader
    drain_state: DrainState
    http: httpx.AsyncClient
    url: str
    stub: verifier_pb2_grpc.VerifierServiceAsyncStub


@pytest.fixture
async def service() -> AsyncIterator[Running]:
    """REST and gRPC on free ports, with one grader of two slots and a queue of two."""
    registry = CollectorRegistry()
    sandbox = WordSandbox()
    grader = Grader(sandbox, VerifierMetrics(registry), VerifierSection(max_queue=2))
    drain_state = DrainState()
    async with AsyncExitStack() as stack:
        url = "http://" + await start_http(make_app(grader, registry, drain_state, MAX_BODY), "127.0.0.1:0", stack)
        server = grpc.aio.server(
            interceptors=[GrpcGate(ApiKeys(), MemoryBudget(1 << 30)), StatusCodes(STATUS_CODES, [FULL_NAME])]
        )
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(
            Servicer(grader, ("layer",), MemoryBudget(1 << 30)), server
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        yield Running(sandbox, grader, drain_state, http, url, stub)
        sandbox.let_go.set()


def request(code: str = "cat", *pairs: tuple[str, str], **fields: object) -> dict[str, object]:
    """A REST request with stdin tests."""
    cases = [{"input": given, "output": wanted} for given, wanted in pairs or (("a", "a"),)]
    return {"code": code, "tests": {"type": "stdin", "cases": cases}, **fields}


def submission(code: str = "cat", *pairs: tuple[str, str]) -> Submission:
    """The same for gRPC."""
    return Submission(StdinTests(tuple(StdinCase(*pair) for pair in pairs or (("a", "a"),))), code)


async def settled(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_verdict_has_the_documented_shape(service: Running) -> None:
    answer = await service.http.post("/v1/grade", json=request("cat", ("1", "1"), ("22", "3")))
    assert answer.status_code == 200
    record = answer.json()
    assert record.pop("duration_s") > 0
    assert record == {
        "verdict": "wrong_answer",
        "passed": 0,
        "total": 2,
        "reward": -1.0,
        "score": 0.0,
        "first_failure": {
            "index": 1,
            "outcome": "wrong_answer",
            "input": "22",
            "expected": "3",
            "output": "22",
            "stderr": "",
        },
        "tests": [
            {
                "index": 1,
                "outcome": "wrong_answer",
                "wall_time_s": 0.01,
                "cpu_time_s": 0.01,
                "memory_bytes": 1000,
                "score": 0.0,
            }
        ],
        "graded": 1,
        "backend": "words",
        "cached": False,
        "detail": "",
    }
    withheld = await service.http.post("/v1/grade", json=request("cat", ("1", "2"), reveal="none"))
    assert withheld.json()["first_failure"] is None


async def test_the_reward_follows_the_verdict_and_is_null_for_internal_error(service: Running) -> None:
    rewards = []
    for code in ("cat", "break"):
        record = (await service.http.post("/v1/grade", json=request(code))).json()
        rewards.append((record["verdict"], record["reward"]))
    assert rewards == [("accepted", 1.0), ("internal_error", None)]


async def test_an_invalid_request_is_422_and_names_the_field(service: Running) -> None:
    for body, field in [
        (b"\xff", "body"),
        (json.dumps(request(colour="red")).encode(), "colour"),
        (json.dumps(request(language="cobol")).encode(), "language"),
        (json.dumps(request(limits={"wall_time_s": 1e9})).encode(), "limits.wall_time_s"),
    ]:
        answer = await service.http.post("/v1/grade", content=body)
        assert (answer.status_code, answer.json()["field"]) == (422, field)
        assert answer.json()["detail"].startswith(field)


async def test_a_too_large_body_is_413_with_and_without_content_length(service: Running) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    assert (await service.http.post("/v1/grade", content=b"x" * (MAX_BODY + 1))).status_code == 413
    assert (await service.http.post("/v1/grade", content=parts())).status_code == 413


async def test_a_full_queue_is_429_with_retry_after_and_the_client_retries(service: Running) -> None:
    asked = [asyncio.ensure_future(service.http.post("/v1/grade", json=request("hang"))) for _ in range(4)]
    await settled(lambda: service.grader.unfinished == 4)
    refused = await service.http.post("/v1/grade", json=request())
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    with pytest.raises(grpc.aio.AioRpcError) as full:
        await service.stub.Grade(verifier_pb2.GradeRequest(submission=SUBMISSION.to(submission())))
    assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with AsyncClient(service.url) as client:
        waiting = asyncio.ensure_future(client.grade_record(request()))
        await asyncio.sleep(0.05)
        service.sandbox.let_go.set()
        assert (await waiting)["verdict"] == "accepted"
    assert {(await one).status_code for one in asked} == {200}


async def test_draining_is_503_and_submissions_in_progress_get_their_verdict(service: Running) -> None:
    inside = asyncio.ensure_future(service.http.post("/v1/grade", json=request("hang")))
    await settled(lambda: service.grader.unfinished == 1)
    assert (await service.http.get("/readyz")).status_code == 200
    service.drain_state.start()
    for path in ("/v1/grade", "/v1/grade/stream", "/v1/grade/batch"):
        assert (await service.http.post(path, json=request())).status_code == 503
    assert (await service.http.get("/readyz")).status_code == 503
    assert (await service.http.get("/healthz")).status_code == 200
    service.sandbox.let_go.set()
    assert (await inside).json()["verdict"] == "accepted"


async def test_a_client_that_disconnects_frees_its_sandbox(service: Running) -> None:
    asked = asyncio.ensure_future(service.http.post("/v1/grade", json=request("hang")))
    await settled(lambda: service.sandbox.open == 1)
    asked.cancel()
    await settled(lambda: service.sandbox.open == 0 and service.grader.unfinished == 0)
    call = service.stub.Grade(verifier_pb2.GradeRequest(submission=SUBMISSION.to(submission("hang"))))
    await settled(lambda: service.sandbox.open == 1)
    call.cancel()
    await settled(lambda: service.sandbox.open == 0 and service.grader.unfinished == 0)
    answer = await service.http.post("/v1/grade", json=request())
    assert answer.json()["verdict"] == "accepted"


async def test_a_deadline_frees_the_sandbox(service: Running) -> None:
    message = verifier_pb2.GradeRequest(submission=SUBMISSION.to(submission("hang")))
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await service.stub.Grade(message, timeout=0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await settled(lambda: service.sandbox.open == 0 and service.grader.unfinished == 0)


async def test_an_http_deadline_is_504_and_frees_the_sandbox(service: Running) -> None:
    late = await service.http.post("/v1/grade", json=request("hang"), headers={"X-Deadline-S": "0.1"})
    assert (late.status_code, late.json()["field"]) == (504, "X-Deadline-S")
    assert "deadline of 0.1 s" in late.json()["detail"]
    await settled(lambda: service.sandbox.open == 0 and service.grader.unfinished == 0)
    for bad in ("soon", "0", "-1", "nan", "1e9"):
        refused = await service.http.post("/v1/grade", json=request(), headers={"X-Deadline-S": bad})
        assert (refused.status_code, refused.json()["field"]) == (422, "X-Deadline-S")
    in_time = await service.http.post("/v1/grade", json=request(), headers={"X-Deadline-S": "10"})
    assert in_time.json()["verdict"] == "accepted"


async def test_a_deadline_during_a_stream_is_its_last_event(service: Running) -> None:
    first, hang = ("first", "first"), ("x", "x")
    service.sandbox.hangs_on = b"x"
    body = request("cat", first, hang)
    late = await service.http.post("/v1/grade/stream", json=body, headers={"X-Deadline-S": "0.2"})
    events = late.text.strip().split("\n\n")
    assert [event.split("\n")[0] for event in events] == ["event: outcome", "event: fault"]
    assert json.loads(events[1].split("data: ")[1])["field"] == "X-Deadline-S"
    lines = json.dumps({"id": 1, **request()}) + "\n" + json.dumps({"id": 2, **request("hang")})
    batch = await service.http.post("/v1/grade/batch", content=lines, headers={"X-Deadline-S": "0.2"})
    answers = [json.loads(line) for line in batch.text.splitlines()]
    assert [answers[0]["id"], answers[1]["field"]] == [1, "X-Deadline-S"]
    await settled(lambda: service.sandbox.open == 0 and service.grader.unfinished == 0)


async def test_a_reader_that_leaves_a_stream_or_a_batch_frees_its_sandbox(service: Running) -> None:
    service.sandbox.hangs_on = b"x"
    body = request("cat", ("first", "first"), ("x", "x"))
    async with service.http.stream("POST", "/v1/grade/stream", json=body) as answer:
        assert await anext(answer.aiter_lines()) == "event: outcome"
        await settled(lambda: service.sandbox.open == 1)
    await settled(lambda: service.sandbox.open == 0 and service.grader.unfinished == 0)
    lines = json.dumps({"id": 1, **request()}) + "\n" + json.dumps({"id": 2, **request("hang")})
    async with service.http.stream("POST", "/v1/grade/batch", content=lines) as answer:
        assert json.loads(await anext(answer.aiter_lines()))["id"] == 1
        await settled(lambda: service.sandbox.open == 1)
    await settled(lambda: service.sandbox.open == 0 and service.grader.unfinished == 0)


async def test_a_stream_sends_each_outcome_then_the_verdict(service: Running) -> None:
    answer = await service.http.post("/v1/grade/stream", json=request("cat", ("a", "a"), ("bb", "bb")))
    events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    assert [lines[0] for lines in events] == ["event: outcome", "event: outcome", "event: verdict"]
    assert [json.loads(lines[1][6:]).get("index") for lines in events] == [1, 0, None]
    assert json.loads(events[2][1][6:])["verdict"] == "accepted"
    bad = await service.http.post("/v1/grade/stream", json=request(language="cobol"))
    assert (bad.status_code, bad.json()["field"]) == (422, "language")


async def test_a_batch_answers_every_line_once_by_id(service: Running) -> None:
    lines = [{"id": f"n{number}", **request("cat", ("a", "a" if number % 2 else "b"))} for number in range(20)]
    body = "\n".join(json.dumps(line) for line in lines) + "\nnot json\n\n" + json.dumps(request(colour="red"))
    answers = [
        json.loads(line) for line in (await service.http.post("/v1/grade/batch", content=body)).text.splitlines()
    ]
    by_id = {answer["id"]: answer for answer in answers}
    assert len(answers) == len(by_id) == 22
    assert all(by_id[f"n{n}"]["verdict"] == ("accepted" if n % 2 else "wrong_answer") for n in range(20))
    assert by_id[20]["field"] == "body"
    assert by_id[21]["field"] == "colour"


async def test_pages(service: Running) -> None:
    await service.http.post("/v1/grade", json=request())
    page = (await service.http.get("/metrics")).text
    for name in (
        'nouscoder_verifier_submissions_total{verdict="accepted"} 1.0',
        'nouscoder_verifier_tests_total{outcome="accepted"} 1.0',
        "nouscoder_verifier_submission_duration_seconds_count 1.0",
        "nouscoder_verifier_test_duration_seconds_count 1.0",
        "nouscoder_verifier_queue_depth 0.0",
        'nouscoder_verifier_sandboxes{state="free"} 2.0',
        "nouscoder_verifier_cache_hits_total 0.0",
        "# TYPE nouscoder_verifier_internal_errors_total counter",
    ):
        assert name in page
    document = (await service.http.get("/openapi.json")).json()
    assert {"/v1/grade", "/v1/grade/stream", "/v1/grade/batch", "/healthz", "/readyz"} <= set(document["paths"])
    assert "tests" in document["components"]["schemas"]["GradeRequest"]["required"]
    assert "StdinTestsBody" in document["components"]["schemas"]


async def test_grpc_grades_streams_and_batches(service: Running) -> None:
    message = SUBMISSION.to(submission("cat", ("a", "a"), ("bb", "b")))
    verdict = VERDICT.of((await service.stub.Grade(verifier_pb2.GradeRequest(submission=message))).verdict)
    assert (verdict.kind, verdict.graded) == (VerdictKind.WRONG_ANSWER, 1)

    stream = service.stub.GradeStream(verifier_pb2.GradeStreamRequest(submission=SUBMISSION.to(submission())))
    assert [event.WhichOneof("event") async for event in stream] == ["outcome", "verdict"]

    async def requests() -> AsyncIterator[verifier_pb2.GradeBatchRequest]:
        for number in range(30):
            wanted = SUBMISSION.to(submission("cat", ("a", "a" if number % 2 else "b")))
            yield verifier_pb2.GradeBatchRequest(request_id=str(number), submission=wanted)

    answers = {one.request_id: VERDICT.of(one.verdict).kind async for one in service.stub.GradeBatch(requests())}
    assert answers == {str(n): VerdictKind.ACCEPTED if n % 2 else VerdictKind.WRONG_ANSWER for n in range(30)}

    answer = await service.stub.Capabilities(verifier_pb2.CapabilitiesRequest())
    assert (answer.backend, answer.num_slots, answer.languages[0]) == ("words", 2, "python")
    assert answer.default_limits.wall_time_s == 15


async def test_grpc_refuses_an_invalid_submission_with_its_field(service: Running) -> None:
    cobol = SUBMISSION.to(replace(submission(), language="cobol"))
    with pytest.raises(grpc.aio.AioRpcError, match="language") as refused:
        await service.stub.Grade(verifier_pb2.GradeRequest(submission=cobol))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="neither code nor completion"):
        await service.stub.Grade(verifier_pb2.GradeRequest())

    for depth in range(100, 1100, 50):
        call = verdict_pb2.CallCase(args_json="[" * depth + "]" * depth, expected_json="[" * depth + "]" * depth)
        tests = verdict_pb2.Tests(call=verdict_pb2.CallTests(entry_point="f", cases=[call]))
        deep = verifier_pb2.GradeRequest(submission=verdict_pb2.Submission(code="cat", tests=tests))
        try:
            assert (await service.stub.Grade(deep)).verdict.kind == verdict_pb2.VERDICT_KIND_RUNTIME_ERROR
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017

    async def requests() -> AsyncIterator[verifier_pb2.GradeBatchRequest]:
        yield verifier_pb2.GradeBatchRequest(request_id="odd", submission=cobol)

    with pytest.raises(grpc.aio.AioRpcError, match="cobol"):
        [one async for one in service.stub.GradeBatch(requests())]


async def test_an_address_in_use_is_one_clear_sentence(service: Running) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(AddressError, match="cannot listen on"):
            await start_http(make_app(service.grader, CollectorRegistry(), DrainState(), 1), service.url[7:], stack)


async def test_the_client_fails_with_one_clear_sentence(service: Running) -> None:
    async with AsyncClient(service.url) as client:
        with pytest.raises(GradingFailed, match="422: colour: unknown field"):
            await client.grade_record(request(colour="red"))
        assert (await client.grade_record(request("break")))["verdict"] == "internal_error"
    async with AsyncClient("http://127.0.0.1:1", Patience(unreachable_s=0.01)) as client:
        with pytest.raises(GradingFailed, match="does not answer"):
            await client.grade_record(request())


_TESTS = 'tests { stdin { cases { input: "a" output: "a" } } } '
WRONG_MESSAGES = [
    ("", "submission has neither code nor completion"),
    ('code: "x"', "tests has none of stdin, call"),
    (_TESTS + 'completion: "x" language: "pythn"', "language: 'pythn' is not installed"),
    (_TESTS + 'code: "x" other_languages: "pythn"', "other_languages: 'pythn' is not installed"),
    (_TESTS + 'code: "x" limits { wall_time_s: -1 }', "limits.wall_time_s must be positive, not -1.0"),
    (_TESTS + 'code: "x" limits { wall_time_s: nan }', "limits.wall_time_s must be positive, not nan"),
    (_TESTS + 'code: "x" limits { wall_time_s: 1e9 }', "limits.wall_time_s: must be at most 300.0"),
    (_TESTS + 'code: "x" comparator { kind: 99 }', "comparator.kind 99 is unknown"),
    (_TESTS + 'code: "x" comparator { float_tolerance: -1 }', "comparator.float_tolerance must be at least 0"),
    (_TESTS + 'code: "x" profile: 99', "profile 99 is unknown"),
    (_TESTS + 'code: "x" files { key: "../a" value: "x" }', "must be a plain name"),
    ('code: "x" tests { stdin { } }', "tests.cases: Field required"),
    (
        'code: "x" tests { call { entry_point: "a b" cases { expected_json: "1" } } }',
        "tests.entry_point: must be the name of a function",
    ),
    (
        'code: "x" tests { call { entry_point: "f" cases { expected_json: "{" } } }',
        "tests.call.cases[0].expected_json is not JSON",
    ),
]


async def test_a_wrong_message_gets_one_sentence(service: Running) -> None:
    for text, sentence in WRONG_MESSAGES:
        message = text_format.Parse(text, verdict_pb2.Submission())
        with pytest.raises(grpc.RpcError) as refused:
            await service.stub.Grade(verifier_pb2.GradeRequest(submission=message))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = refused.value.details() or ""
        assert sentence in details, text
        assert "\n" not in details
