"""What a request may cost the gateway: memory of bodies and answers, gRPC messages, foreign sites.

Tests the invariants of memory_budget.py, grpc_gate.py, servicer.py and gatekeeper.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import httpx
import pytest
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry
from tests.load.floods import GRADE, PREFACE, field, frame

from nouscoder.config import VerifierSection
from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.http_server import delivery, memory_budget
from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.foreign_sites import foreign_part
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.memory_budget import MemoryBudget, Reservation
from nouscoder.rpc.pairs import SUBMISSION
from nouscoder.rpc.server import start_grpc
from nouscoder.v1 import verdict_pb2, verifier_pb2, verifier_pb2_grpc
from nouscoder.verifier import process as process_module
from nouscoder.verifier.access.grpc_connections import HEAD_BYTES
from nouscoder.verifier.access.grpc_gate import GrpcGate
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.run_code import (
    CodeRunner,
    CommandResult,
    CommandStatus,
    RunCodeAnswer,
    RunCodeRequest,
    RunStatus,
)
from nouscoder.verifier.api.servicer import FULL_NAME, Servicer
from nouscoder.verifier.grading.grader import Grader, Grading, OnOutcome
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.process import grpc_served
from nouscoder.verifier.sandbox.fake import FakeSandbox

BUDGET_BYTES = 20_000
KEY = f"ann:{hashlib.sha256(b's3cret').hexdigest()}"


@dataclass
class Running:
    http: httpx.AsyncClient
    address: str
    grpc: str
    budget: MemoryBudget
    gate: GrpcGate


@asynccontextmanager
async def running(
    api_keys: ApiKeys | None = None,
    hosts: tuple[str, ...] = (),
    budget_bytes: int = BUDGET_BYTES,
    grader: Grading | None = None,
    runner: CodeRunner | None = None,
) -> AsyncIterator[Running]:
    """REST and gRPC on free ports, with programs that echo their input."""
    sandbox, registry, budget = FakeSandbox(), CollectorRegistry(), MemoryBudget(budget_bytes)
    await sandbox.start()
    keys = api_keys or ApiKeys()
    grader = grader or Grader(sandbox, VerifierMetrics(registry))
    section = VerifierSection(grpc="127.0.0.1:0", max_queue=1, drain_s=0)
    async with AsyncExitStack() as stack:
        app = make_app(grader, registry, DrainState(), 15_000, keys, runner, budget=budget, hosts=hosts)
        address = await start_http(app, "127.0.0.1:0", stack)
        servicer, gate = Servicer(grader, (), budget), GrpcGate(keys, budget)
        calls = await start_grpc(grpc_served(section, servicer, registry, gate), stack)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{address}", timeout=60))
        yield Running(http, address, calls, budget, gate)


def body(num_bytes: int = 100) -> bytes:
    """A submission of this size."""
    request = {"code": "1", "tests": {"type": "stdin", "cases": [{"input": "a", "output": "a"}]}}
    request["code"] = "#" * (num_bytes - len(json.dumps(request)) + 1)
    return json.dumps(request).encode()


async def held(service: Running, num_bytes: int) -> None:
    """Wait until the requests in progress hold this many bytes."""
    async with asyncio.timeout(60):
        while service.budget.held_bytes != num_bytes:
            await asyncio.sleep(0.01)


async def test_bodies_in_progress_are_bounded_together_and_give_their_bytes_back() -> None:
    async with running() as service:
        host, _, port = service.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/grade HTTP/1.1\r\nHost: a\r\nContent-Length: 15000\r\n\r\n" + b" " * 14_000)
        await held(service, 14_000)
        refused = await service.http.post("/v1/grade", content=body(10_000))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "memory" in refused.json()["detail"]
        assert (await service.http.post("/v1/grade", content=body(2_000))).json()["verdict"] == "accepted"
        writer.close()
        await held(service, 0)
        assert (await service.http.post("/v1/grade", content=body(10_000))).json()["verdict"] == "accepted"
        await held(service, 0)


async def test_calls_whose_message_does_not_arrive_end_when_the_memory_is_full() -> None:
    """Before, 40 connections held 2.4 GiB of messages without their last bytes, for ever and without a token."""

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with running() as service, grpc.aio.insecure_channel(service.grpc) as channel:
        calls = [
            channel.stream_unary(f"/{FULL_NAME}/Grade", bytes, bytes)(never()),
            channel.stream_stream(f"/{FULL_NAME}/GradeStream", bytes, bytes)(never()),
            channel.stream_stream(f"/{FULL_NAME}/GradeBatch", bytes, bytes)(never()),
        ]
        async with asyncio.timeout(60):
            while len(service.gate._reading) < len(calls):
                await asyncio.sleep(0.01)
        looking = asyncio.create_task(service.gate.bound_memory(1 << 50))
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls)
        looking.cancel()
        looking = asyncio.create_task(service.gate.bound_memory(0))
        assert [await call.code() for call in calls] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * len(calls)
        looking.cancel()
        message = SUBMISSION.to(Submission(StdinTests((StdinCase("a", "a"),)), code="1"))
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        answer = await stub.Grade(verifier_pb2.GradeRequest(submission=message))
        assert answer.verdict.kind == verdict_pb2.VERDICT_KIND_ACCEPTED


async def test_connections_that_send_headers_without_end_are_closed_and_others_stay() -> None:
    """Before, each held 20 to 50 MiB: gRPC's limit of metadata holds only once the client has acknowledged it."""
    endless = PREFACE + frame(1, 0, 1, GRADE) + frame(9, 0, 1, field(b"x", b"y" * 16_000)) * (2 * HEAD_BYTES // 16_000)
    message = SUBMISSION.to(Submission(StdinTests((StdinCase("a", "a"),)), code="#" * (2 * HEAD_BYTES)))
    async with (
        asyncio.timeout(100),
        running(budget_bytes=64 * HEAD_BYTES) as service,
        grpc.aio.insecure_channel(service.grpc) as channel,
    ):
        honest = verifier_pb2_grpc.VerifierServiceStub(channel).GradeBatch()

        async def graded(name: str) -> str:
            await honest.write(verifier_pb2.GradeBatchRequest(request_id=name, submission=message))
            answer = await honest.read()
            assert isinstance(answer, verifier_pb2.GradeBatchResponse)
            return answer.request_id

        assert await graded("before") == "before"
        reader, flood = await connected(service.grpc)
        flood.write(endless)
        connections, port = service.gate._connections, int(service.grpc.rpartition(":")[2])
        while not connections.close_unknown(port, is_full=False):
            await asyncio.sleep(0.01)
        await ended(reader)
        assert await graded("after") == "after"
        reader, flood = await connected(service.grpc)
        flood.write(endless)
        watch = asyncio.create_task(service.gate.bound_memory(0, service.grpc))  # full: an earlier call does not count
        await ended(reader)
        watch.cancel()
        honest.cancel()


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What arrives until the server closes the connection."""
    taken = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(1 << 16):
            taken += part
    return taken


async def test_a_client_that_never_acknowledges_the_settings_is_disconnected() -> None:
    """The limits of metadata, frames and streams do not hold for such a client."""
    async with running() as service:
        reader, writer = await connected(service.grpc)
        writer.write(PREFACE)
        async with asyncio.timeout(60):
            assert b"settings_timeout" in await ended(reader)


async def test_a_batch_reads_a_request_only_when_the_budget_has_room_for_it() -> None:
    source = StdinTests((StdinCase("a", "a"),))
    message = SUBMISSION.to(Submission(source, code="#" * 9_000))
    async with running() as service, grpc.aio.insecure_channel(service.grpc) as channel:
        most_held = 0
        add = Reservation.add

        def counted(reservation: Reservation, num_bytes: int) -> None:
            nonlocal most_held
            add(reservation, num_bytes)
            most_held = max(most_held, service.budget.held_bytes)

        async def requests() -> AsyncIterator[verifier_pb2.GradeBatchRequest]:
            for number in range(6):
                yield verifier_pb2.GradeBatchRequest(request_id=str(number), submission=message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reservation, "add", counted)
            answers = verifier_pb2_grpc.VerifierServiceStub(channel).GradeBatch(requests())
            assert sorted([answer.request_id async for answer in answers]) == list("012345")
        assert 9_000 < most_held <= BUDGET_BYTES
        await held(service, 0)


async def test_a_call_without_a_token_ends_before_its_message_is_read() -> None:
    """The client never sends a whole message, so an answer shows that none was needed."""
    never = asyncio.Event()

    async def nothing() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async with running(ApiKeys(environment=KEY)) as service, grpc.aio.insecure_channel(service.grpc) as channel:
        for method in ("Grade", "GradeStream", "GradeBatch"):
            start = channel.stream_stream(f"/{FULL_NAME}/{method}", bytes, bytes)
            call = start(nothing(), timeout=60)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


# Sends compressed zeros, eight calls at once, and prints how each ended.
COMPRESSED = """
import asyncio, sys, grpc
async def main(address, service):
    async with grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_unary(f"/{service}/Grade")
        found = await asyncio.gather(*(call(bytes(60 << 20), timeout=120) for _ in range(8)), return_exceptions=True)
        print(*(one.code().name for one in found))
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("keys", [KEY, None], ids=["tokens", "open"])
async def test_compressed_messages_are_never_expanded(keys: str | None) -> None:
    """480 MiB of zeros arrive as half a MiB. Without its token a call is refused for one reason or the other."""
    async with running(ApiKeys(environment=keys)) as service:
        before = most_memory_from_now()
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", COMPRESSED, service.grpc, FULL_NAME, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await client.communicate()
        codes = said.decode().split()
        assert len(codes) == 8
        assert set(codes) <= {"UNIMPLEMENTED", *(["UNAUTHENTICATED"] if keys else [])}
        assert status_bytes("VmHWM") < before + (48 << 20)


async def test_a_message_is_counted_before_it_is_parsed() -> None:
    """The bytes are no message, so INVALID_ARGUMENT would show that they were parsed."""
    async with running() as service, grpc.aio.insecure_channel(service.grpc) as channel:
        for method, code in (("Grade", "unary_unary"), ("GradeStream", "unary_stream")):
            start = getattr(channel, code)(f"/{FULL_NAME}/{method}", bytes, bytes)
            assert await start(b"\xff" * 30_000, timeout=60).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await start(b"\xff" * 10_000, timeout=60).code() is grpc.StatusCode.INVALID_ARGUMENT
        await held(service, 0)


async def test_more_calls_at_once_than_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_MORE_CALLS", 1)
    async with running() as service, grpc.aio.insecure_channel(service.grpc) as channel:
        start = channel.stream_stream(f"/{FULL_NAME}/GradeBatch", bytes, bytes)
        open_calls = [start(timeout=60) for _ in range(3)]  # two for each place in the queue, and one more
        for call in open_calls:
            await call.initial_metadata()
        assert await start(timeout=60).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in open_calls:
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK


class Saying:
    """A grader whose verdict says a long text."""

    backend = "none"
    num_slots = 1
    unfinished = 0

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        return Verdict(VerdictKind.ACCEPTED, 1, 1, 1, 0.0, self.backend, detail="x" * self._num_bytes)


class Printing:
    """In place of CodeRunner: every program prints so many NUL characters on stdout and on stderr."""

    def __init__(self, num_chars: int) -> None:
        self.num_runs = 0
        self._num_chars = num_chars

    async def run(self, request: RunCodeRequest) -> RunCodeAnswer:
        self.num_runs += 1
        stdout, stderr = (bytes(self._num_chars).decode() for _ in range(2))
        ran = CommandResult(status=CommandStatus.FINISHED, return_code=0, stdout=stdout, stderr=stderr)
        return RunCodeAnswer(status=RunStatus.SUCCESS, run_result=ran)


RUN = b'{"code": "1", "language": "python"}'


def connection_that_reads_nothing(address: str, path: str, sent: bytes) -> socket.socket:
    """A connection that has sent a request. Its own buffer takes little of the answer."""
    host, _, port = address.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.connect((host, int(port)))
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
    return client


async def test_answers_that_nobody_reads_take_no_more_than_the_budget() -> None:
    """84 MiB of JSON for each of five clients; 14 MiB while it is text."""
    runner = Printing(7 << 20)
    budget_bytes = 32 << 20
    async with running(budget_bytes=budget_bytes, runner=cast(CodeRunner, runner)) as service:
        before = most_memory_from_now()
        clients = [connection_that_reads_nothing(service.address, "/run_code", RUN) for _ in range(5)]
        async with asyncio.timeout(60):
            while runner.num_runs < 5 or service.budget.held_bytes < 28 << 20:
                await asyncio.sleep(0.01)
        refused = await service.http.post("/run_code", content=RUN)
        assert (refused.status_code, refused.headers["retry-after"]) == (504, "1")
        assert "memory" in refused.json()["detail"]
        assert (await service.http.get("/healthz")).status_code == 200
        assert 28 << 20 < service.budget.held_bytes <= budget_bytes
        assert status_bytes("VmHWM") < before + budget_bytes + (40 << 20)
        for client in clients:
            client.close()
        await held(service, 0)
        answer = await service.http.post("/run_code", content=RUN)
        assert answer.json()["run_result"]["stdout"] == "\0" * (7 << 20)


@pytest.mark.parametrize("path", ["/v1/grade", "/v1/grade/stream", "/v1/grade/batch", "/run_code"])
async def test_a_client_that_does_not_read_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(delivery, "ANSWER_PATIENCE_S", 0.5)
    held_bytes: list[int] = []
    take = MemoryBudget.take_for_answer

    async def noted(budget: MemoryBudget, num_bytes: int) -> None:
        await take(budget, num_bytes)
        held_bytes.append(budget.held_bytes)

    monkeypatch.setattr(MemoryBudget, "take_for_answer", noted)
    num_bytes = 24 << 20
    runner = cast(CodeRunner, Printing(num_bytes // 2))
    async with running(budget_bytes=1 << 28, grader=Saying(num_bytes), runner=runner) as service:
        sent = RUN if path == "/run_code" else body()
        client = connection_that_reads_nothing(service.address, path, sent)
        async with asyncio.timeout(60):
            while not held_bytes:
                await asyncio.sleep(0.001)
        await held(service, 0)
        assert max(held_bytes) >= num_bytes
        assert len(await asyncio.to_thread(read_to_the_end, client)) < num_bytes
        monkeypatch.setattr(delivery, "ANSWER_PATIENCE_S", 60.0)  # of a client that reads, on a busy machine
        answer = await service.http.post(path, content=sent)
        assert len(answer.content) > num_bytes
        await held(service, 0)


def read_to_the_end(client: socket.socket) -> bytes:
    """All that the connection still gives."""
    said = b""
    with client:
        try:
            while more := client.recv(1 << 16):
                said += more
        except ConnectionError:
            pass
    return said


async def test_an_answer_waits_for_room_and_is_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(budget_bytes=1 << 20, grader=Saying(100_000)) as service:
        service.budget.take(1_000_000)
        waiting = asyncio.ensure_future(service.http.post("/v1/grade", content=body()))
        await asyncio.sleep(0)
        while service.budget.held_bytes == 1_000_000:  # its body is not here yet
            await asyncio.sleep(0.001)
        service.budget.held_bytes -= 1_000_000
        assert (await waiting).json()["verdict"] == "accepted"
        await held(service, 0)
        service.budget.take(1_000_000)
        monkeypatch.setattr(memory_budget, "ROOM_PATIENCE_S", 0.0)
        for path in ("/v1/grade", "/v1/grade/stream", "/v1/grade/batch"):
            refused = await service.http.post(path, content=body())
            assert "as much memory as they may" in refused.text
            if path == "/v1/grade":
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                assert refused.headers["x-request-id"]
            if path == "/v1/grade/stream":
                assert refused.text.startswith("event: fault\n")
        stub_code = await grade_call(service)
        assert stub_code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await held(service, 1_000_000)


async def grade_call(service: Running) -> grpc.StatusCode:
    """How a gRPC call ends."""
    source = SUBMISSION.to(Submission(StdinTests((StdinCase("a", "a"),)), code="1"))
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Grade(verifier_pb2.GradeRequest(submission=source))
        return await call.code()


@pytest.mark.parametrize("method", ["Grade", "GradeStream", "GradeBatch"])
async def test_a_grpc_answer_that_nobody_reads_is_counted_and_leaves_room_to_others(method: str) -> None:
    """A client of streams reads a message only when it is asked for."""
    source = SUBMISSION.to(Submission(StdinTests((StdinCase("a", "a"),)), code="1"))
    request: Message = verifier_pb2.GradeRequest(submission=source)
    if method == "GradeBatch":
        request = verifier_pb2.GradeBatchRequest(request_id="1", submission=source)
    num_bytes = 24 << 20
    async with running(budget_bytes=5 * num_bytes, grader=Saying(num_bytes)) as service:
        async with grpc.aio.insecure_channel(service.grpc, options=[("grpc.max_receive_message_length", -1)]) as one:
            calls = [one.stream_stream(f"/{FULL_NAME}/{method}", bytes, bytes)() for _ in range(2)]
            for call in calls:
                await call.write(request.SerializeToString())
                await call.done_writing()
            async with asyncio.timeout(60):
                while service.budget.held_bytes < num_bytes:
                    await asyncio.sleep(0.001)
            ended = [asyncio.ensure_future(call.code()) for call in calls]
            (refused,), (unread,) = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            assert refused.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert num_bytes < service.budget.held_bytes < num_bytes + 10_000
            assert (await service.http.post("/v1/grade", content=body())).json()["verdict"] == "accepted"
            assert len(cast(bytes, await calls[ended.index(unread)].read())) > num_bytes
            assert await unread is grpc.StatusCode.OK
        await held(service, 0)


def most_memory_from_now() -> int:
    """The memory of this process now. VmHWM counts anew from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A size of this process, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


@pytest.mark.parametrize(
    ("host", "origin", "foreign"),
    [
        ("127.0.0.1:8080", None, None),
        ("[::1]:8080", None, None),
        ("localhost", "http://localhost", None),
        ("nouscoder-verifier:8080", None, None),
        ("verifier.team.svc.cluster.local", None, None),
        ("judge.example.org", "https://judge.example.org", None),
        ("127.0.0.1:8080", "https://judge.example.org", None),
        (None, None, None),
        ("evil.example.com", None, "Host"),
        ("127.0.0.1.evil.com", None, "Host"),
        ("", None, "Host"),
        ("[", None, "Host"),
        ("127.0.0.1:8080", "http://evil.example.com", "Origin"),
        ("127.0.0.1:8080", "http://127.0.0.1:9999", "Origin"),
        ("127.0.0.1:8080", "null", "Origin"),
        ("127.0.0.1:8080", "http://[", "Origin"),
        ("127.0.0.1:8080", "http://[::1", "Origin"),
        ("127.0.0.1:8080", "", "Origin"),
        (None, "http://evil.example.com", "Origin"),
    ],
)
def test_which_requests_come_from_a_foreign_site(host: str | None, origin: str | None, foreign: str | None) -> None:
    assert foreign_part(host, origin, {"judge.example.org"}) == foreign


async def test_a_service_without_tokens_refuses_foreign_sites_and_one_with_tokens_does_not() -> None:
    evil = {"Origin": "http://evil.example.com", "Content-Type": "text/plain"}
    async with running(hosts=("Judge.example.org",)) as service:
        for headers, field in ((evil, "Origin"), ({"Host": "evil.example.com"}, "Host")):
            refused = await service.http.post("/v1/grade", content=body(), headers=headers)
            assert (refused.status_code, refused.json()["field"]) == (403, field)
            assert (await service.http.get("/healthz", headers=headers)).status_code == 200
        for headers in ({}, {"Origin": f"http://{service.address}"}, {"Host": "judge.example.org"}):
            accepted = await service.http.post("/v1/grade", content=body(), headers=headers)
            assert accepted.json()["verdict"] == "accepted"
    async with running(ApiKeys(environment=KEY)) as service:
        bearer = {**evil, "Authorization": "Bearer s3cret"}
        accepted = await service.http.post("/v1/grade", content=body(), headers=bearer)
        assert accepted.json()["verdict"] == "accepted"


async def test_no_redirect_repeats_the_host_of_the_request() -> None:
    async with running() as service:
        answer = await service.http.get("/healthz/", headers={"Host": "evil.example.com"})
        assert (answer.status_code, answer.headers.get("location")) in ((403, None), (404, None))
