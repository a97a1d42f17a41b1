"""API keys over HTTP and gRPC, their quotas, their reload, and the paths that need no key."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from nouscoder.cli import app as cli
from nouscoder.client import Client
from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.http_server.api_keys import ApiKeys, ApiKeysUnusable, Quota, new_api_key, open_api_keys, parse_api_keys
from nouscoder.http_server.listener import start_http
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.rpc.pairs import SUBMISSION
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.v1 import verifier_pb2, verifier_pb2_grpc
from nouscoder.verifier.access.caller import Caller, CallerFilter, current_caller, set_caller
from nouscoder.verifier.access.grpc_gate import GrpcGate
from nouscoder.verifier.access.quotas import QuotaExceeded, QuotaGrader, Quotas
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.api.servicer import FULL_NAME, STATUS_CODES, Servicer
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

BODY = {"code": "1", "tests": {"type": "stdin", "cases": [{"input": "a", "output": "a"}]}}


def line(secret: str, name: str = "ann", quota: str = "") -> str:
    return f"{name}:{hashlib.sha256(secret.encode()).hexdigest()}{quota}"


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@dataclass
class Running:
    http: httpx.AsyncClient
    stub: verifier_pb2_grpc.VerifierServiceAsyncStub


@asynccontextmanager
async def running(api_keys: ApiKeys) -> AsyncIterator[Running]:
    """The service with a sandbox whose programs echo their input."""
    sandbox = FakeSandbox()
    await sandbox.start()
    registry = CollectorRegistry()
    grader = QuotaGrader(Grader(sandbox, VerifierMetrics(registry)), Quotas())
    async with AsyncExitStack() as stack:
        address = await start_http(make_app(grader, registry, DrainState(), 10_000, api_keys), "127.0.0.1:0", stack)
        server = grpc.aio.server(
            interceptors=[GrpcGate(api_keys, MemoryBudget(1 << 30)), StatusCodes(STATUS_CODES, [FULL_NAME])]
        )
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Servicer(grader, (), MemoryBudget(1 << 30)), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{address}", timeout=60))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        yield Running(http, verifier_pb2_grpc.VerifierServiceStub(channel))


async def test_grading_needs_a_valid_key_and_health_does_not() -> None:
    async with running(ApiKeys(environment=line("s3cret"))) as service:
        for headers in (
            {},
            bearer("wrong"),
            {"Authorization": "Bearer"},
            {"Authorization": "Basic s3cret"},
            {"Authorization": "s3cret"},
        ):
            for path in ("/v1/grade", "/v1/grade/stream", "/v1/grade/batch", "/nowhere"):
                refused = await service.http.post(path, json=BODY, headers=headers)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await service.http.get("/metrics")).status_code == 401
        for path in ("/healthz", "/readyz", "/openapi.json"):
            assert (await service.http.get(path)).status_code == 200
        answer = await service.http.post("/v1/grade", json=BODY, headers=bearer("s3cret"))
        assert answer.json()["verdict"] == "accepted"


async def test_every_grpc_method_needs_a_valid_key() -> None:
    message = SUBMISSION.to(Submission(StdinTests((StdinCase("a", "a"),)), "1"))

    async def batch() -> AsyncIterator[verifier_pb2.GradeBatchRequest]:
        yield verifier_pb2.GradeBatchRequest(request_id="1", submission=message)

    async with running(ApiKeys(environment=line("s3cret"))) as service:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await service.stub.Grade(verifier_pb2.GradeRequest(submission=message), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await service.stub.Capabilities(verifier_pb2.CapabilitiesRequest(), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            for stream in (
                service.stub.GradeStream(verifier_pb2.GradeStreamRequest(submission=message), metadata=metadata),
                service.stub.GradeBatch(batch(), metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    [one async for one in stream]
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        good = (("authorization", "Bearer s3cret"), ("x-request-id", "mine-1"))
        call = service.stub.Grade(verifier_pb2.GradeRequest(submission=message), metadata=good)
        assert (await call).verdict.passed == 1
        assert dict(await call.initial_metadata())["x-request-id"] == "mine-1"
        assert len([one async for one in service.stub.GradeBatch(batch(), metadata=good)]) == 1


async def test_without_configured_keys_the_service_is_open_and_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOUSCODER_VERIFIER_TOKENS", raising=False)
    api_keys = open_api_keys("")
    assert "no API keys are configured: anyone" in caplog.text
    async with running(api_keys) as service:
        assert (await service.http.post("/v1/grade", json=BODY)).status_code == 200


async def test_an_exceeded_quota_is_refused_with_retry_after_and_affects_no_other_client() -> None:
    lines = [line("a", "ann", "::2"), line("b", "bob")]
    async with running(ApiKeys(environment="\n".join(lines))) as service:
        got = [await service.http.post("/v1/grade", json=BODY, headers=bearer("a")) for _ in range(3)]
        assert [one.status_code for one in got] == [200, 200, 429]
        assert 1 <= int(got[2].headers["retry-after"]) <= 30
        assert "may submit 2 a minute" in got[2].json()["detail"]
        assert (await service.http.post("/v1/grade", json=BODY, headers=bearer("b"))).status_code == 200
        message = verifier_pb2.GradeRequest(submission=SUBMISSION.to(Submission(StdinTests((StdinCase("", ""),)), "1")))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await service.stub.Grade(message, metadata=(("authorization", "Bearer a"),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(refused.value.trailing_metadata() or ())["retry-after"]) >= 1


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "wait"]), st.floats(0, 40)), max_size=60))
def test_a_client_never_exceeds_its_quota(events: list[tuple[str, float]]) -> None:
    """Both parts of the invariant of quotas.py, over any history."""
    now_s = 0.0
    quotas = Quotas(clock=lambda: now_s)
    caller = Caller("ann", "r", Quota(max_in_flight=3, submissions_per_minute=6))
    inside: list[AbstractContextManager[None]] = []
    entered_s: list[float] = []
    waits_s: list[int] = []
    for kind, seconds in events:
        if kind == "wait":
            now_s += seconds
        elif kind == "leave" and inside:
            inside.pop().__exit__(None, None, None)
        elif kind == "enter":
            admitted = quotas.admitted(caller)
            try:
                admitted.__enter__()
            except QuotaExceeded as refusal:
                waits_s.append(refusal.retry_after_s)
                continue
            inside.append(admitted)
            entered_s.append(now_s)
        assert len(inside) <= 3
    assert all(1 <= wait_s <= 10 for wait_s in waits_s)
    for first in range(len(entered_s)):
        for last in range(first, len(entered_s)):
            assert last - first + 1 <= 6 * (1 + (entered_s[last] - entered_s[first]) / 60) + 1e-6


def test_a_refusal_for_submissions_in_flight_does_not_use_up_the_rate_quota() -> None:
    quotas = Quotas(clock=lambda: 0.0)
    caller = Caller("ann", "r", Quota(1, 2))
    with quotas.admitted(caller):
        for _ in range(5):
            with pytest.raises(QuotaExceeded, match="1 submissions in flight"), quotas.admitted(caller):
                pass
    with quotas.admitted(caller):
        pass


def test_a_changed_key_file_is_reloaded_and_an_invalid_one_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The invariant of api_keys.py."""
    monkeypatch.setattr("nouscoder.http_server.api_keys._CHECK_INTERVAL_S", 0.0)
    file = tmp_path / "tokens"
    file.write_text(f"# ours\n\n{line('one')}\n")
    api_keys = ApiKeys(file)
    assert [api_keys.find("one") is not None, api_keys.find("two") is not None] == [True, False]
    file.write_text(f"{line('two', 'bob')}\n{line('three', 'bob', ':7')}\n")
    assert [api_keys.find(secret) is not None for secret in ("one", "two", "three")] == [False, True, True]
    held = api_keys.find("three")
    assert held is not None
    assert (held.client, held.quota) == ("bob", Quota(7, None))
    file.write_text("ann:nonsense\n")
    assert api_keys.find("two") is not None
    api_keys.find("two")
    assert caplog.text.count("API keys not read") == 1
    os.unlink(file)
    api_keys.reload()
    assert api_keys.find("two") is not None
    file.write_text("# nobody\n")
    assert api_keys.find("two") is None
    assert not api_keys.is_open


@pytest.mark.parametrize(
    "bad", ["ann", "ann:", "ann:abc", f"a b:{'0' * 64}", line("x") + ":0", line("x") + ":-1", line("x") + ":1:2:3", ":"]
)
def test_an_invalid_line_is_refused_with_its_number(bad: str, tmp_path: Path) -> None:
    with pytest.raises(ApiKeysUnusable, match=r"tokens:2: "):
        parse_api_keys([line("x"), bad], "tokens")


def test_the_command_makes_a_key_that_the_service_accepts(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["tokens", "new", "trainer-1"])
    secret = done.stderr.strip().rsplit(" ", 1)[1]
    file = tmp_path / "tokens"
    file.write_text(done.stdout)
    held = ApiKeys(file).find(secret)
    assert held is not None
    assert held.client == "trainer-1"
    assert secret not in done.stdout
    with pytest.raises(ApiKeysUnusable, match="not a valid client name"):
        new_api_key("a:b")


async def test_the_clients_request_id_is_kept_when_it_is_valid(caplog: pytest.LogCaptureFixture) -> None:
    async with running(ApiKeys()) as service:
        own = await service.http.post("/v1/grade", json=BODY, headers={"X-Request-Id": "run-7/rollout:3"})
        assert own.headers["x-request-id"] == "run-7/rollout:3"
        for unfit in ("x" * 200, "a b", '{"forged": 1}'):
            answer = await service.http.post("/v1/grade", json=BODY, headers={"X-Request-Id": unfit})
            assert len(answer.headers["x-request-id"]) == 16
        assert (await service.http.get("/nowhere")).headers["x-request-id"]


async def test_log_records_name_the_caller() -> None:
    async def one(name: str) -> tuple[str, str]:
        set_caller(Caller(name, f"id-{name}"))
        await asyncio.sleep(0)
        record = logging.makeLogRecord({"msg": "x"})
        assert CallerFilter().filter(record)
        return record.__dict__["client"], record.__dict__["request_id"]

    assert list(await asyncio.gather(one("ann"), one("bob"))) == [("ann", "id-ann"), ("bob", "id-bob")]
    assert current_caller().client == "itself"


def test_the_python_client_sends_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOUSCODER_TOKEN", "from-environment")
    with Client("http://127.0.0.1:1") as client:
        assert client._http.headers["authorization"] == "Bearer from-environment"
    with Client("http://127.0.0.1:1", token="given") as client:
        assert client._http.headers["authorization"] == "Bearer given"
