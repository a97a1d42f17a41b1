"""What a request may cost the gateway: memory of all bodies, messages of callers without a token, foreign sites.

Tests the invariants of memory_budget.py and gatekeeper.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.same_site import foreign_part
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.rpc.verdict_convert import submission_to
from nouscoder.v1 import verifier_pb2, verifier_pb2_grpc
from nouscoder.verifier.access.grpc_gate import GrpcGate
from nouscoder.verifier.access.memory_budget import MemoryBudget, Reservation
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.run_code import RunCodeRequest
from nouscoder.verifier.api.servicer import FULL_NAME, STATUS_CODES, Servicer
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

BUDGET_BYTES = 20_000
KEY = f"ann:{hashlib.sha256(b's3cret').hexdigest()}"


@dataclass
class Running:
    http: httpx.AsyncClient
    address: str
    grpc: str
    budget: MemoryBudget


@asynccontextmanager
async def running(api_keys: ApiKeys | None = None, hosts: tuple[str, ...] = ()) -> AsyncIterator[Running]:
    """REST and gRPC on free ports, with programs that echo their input."""
    sandbox, registry, budget = FakeSandbox(), CollectorRegistry(), MemoryBudget(BUDGET_BYTES)
    await sandbox.start()
    keys = api_keys or ApiKeys()
    grader = Grader(sandbox, VerifierMetrics(registry))
    async with AsyncExitStack() as stack:
        app = make_app(grader, registry, DrainState(), 15_000, keys, budget=budget, hosts=hosts)
        address = await start_http(app, "127.0.0.1:0", stack)
        server = grpc.aio.server(
            interceptors=[GrpcGate(keys), StatusCodes(STATUS_CODES, [FULL_NAME])],
            options=[("grpc.max_receive_message_length", 64 << 20)],
        )
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Servicer(grader, (), budget), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{address}", timeout=60))
        yield Running(http, address, f"127.0.0.1:{port}", budget)


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


async def test_a_batch_reads_a_request_only_when_the_budget_has_room_for_it() -> None:
    source = StdinTests((StdinCase("a", "a"),))
    message = submission_to(Submission(source, code="#" * 9_000))
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


# Sends compressed zeros without a token, eight calls at once, and prints how each ended.
COMPRESSED = """
import asyncio, sys, grpc
async def main(address, service):
    async with grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_unary(f"/{service}/Grade")
        found = await asyncio.gather(*(call(bytes(60 << 20), timeout=120) for _ in range(8)), return_exceptions=True)
        print(*(one.code().name for one in found))
asyncio.run(main(*sys.argv[1:]))
"""


async def test_compressed_messages_without_a_token_are_never_expanded() -> None:
    """480 MiB of zeros arrive as half a MiB. The most memory of this process is counted anew from here."""
    async with running(ApiKeys(environment=KEY)) as service:
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", COMPRESSED, service.grpc, FULL_NAME, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await client.communicate()
        assert said.decode().split() == ["UNAUTHENTICATED"] * 8
        assert status_bytes("VmHWM") < before + (48 << 20)


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


def test_the_output_of_run_code_is_bounded_by_the_size_of_its_answer() -> None:
    """A NUL character has six bytes in JSON."""
    limits = RunCodeRequest(code="print(1)", language="python").program().limits
    assert 6 * limits.output_bytes <= 64 * 1024**2
