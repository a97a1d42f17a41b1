"""TLS and mTLS of both APIs with certificates from files, and the plain health port."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.client import AsyncClient, Patience, TlsFailed, Unreachable
from nouscoder.config import ConfigError, TlsSection, load_config
from nouscoder.errors import Unusable
from nouscoder.http_server.listener import http_context, start_http
from nouscoder.http_server.memory_budget import MemoryBudget
from nouscoder.rpc.server import Served, start_grpc
from nouscoder.v1 import verifier_pb2, verifier_pb2_grpc
from nouscoder.verifier.api.rest import DrainState, make_app, make_health_app
from nouscoder.verifier.api.servicer import FULL_NAME, Servicer, grpc_credentials
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

TESTS = {"type": "stdin", "cases": [{"input": "a", "output": "a"}]}
ASK = verifier_pb2.CapabilitiesRequest()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates of a service at 127.0.0.1 and of a client signed by it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: install it to make the certificates of this test")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(*new_key, "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    for name in ("service", "client"):
        (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl(*new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        sign = ("x509", "-req", "-days", "2", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        openssl(*sign, "-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext")
    return folder


@dataclass
class Running:
    url: str
    grpc: str
    health: str


async def start(section: TlsSection, stack: AsyncExitStack) -> Running:
    """Start both APIs and the health port with a sandbox that echoes."""
    sandbox = FakeSandbox()
    await sandbox.start()
    registry = CollectorRegistry()
    grader = Grader(sandbox, VerifierMetrics(registry))
    drain_state = DrainState()
    http = await start_http(
        make_app(grader, registry, drain_state, 10_000), "127.0.0.1:0", stack, http_context(section)
    )
    health = await start_http(make_health_app(drain_state), "127.0.0.1:0", stack)
    servicer = Servicer(grader, (), MemoryBudget(1 << 30))
    served = Served(
        address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        full_names=[FULL_NAME],
        register=lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server),
        registry=registry,
        drain_s=0.1,
        credentials=grpc_credentials(section),
    )
    return Running(f"https://{http}", await start_grpc(served, stack), f"http://{health}")


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def section(files: Path, client_ca: str = "") -> TlsSection:
    return TlsSection(certificate=str(files / "service.pem"), key=str(files / "service.key"), client_ca=client_ca)


async def capabilities(address: str, credentials: grpc.ChannelCredentials | None) -> str:
    """The backend that the service names; raises AioRpcError."""
    channel = grpc.aio.secure_channel(address, credentials) if credentials else grpc.aio.insecure_channel(address)
    async with channel:
        stub: verifier_pb2_grpc.VerifierServiceAsyncStub = verifier_pb2_grpc.VerifierServiceStub(channel)
        return (await stub.Capabilities(ASK, timeout=60)).backend


async def test_tls_serves_clients_that_trust_the_authority_and_refuses_plain_text(
    files: Path, stack: AsyncExitStack
) -> None:
    running = await start(section(files), stack)
    trusting = ssl.create_default_context(cafile=str(files / "ca.pem"))
    async with AsyncClient(running.url, tls=trusting) as client:
        assert (await client.grade(code="1", tests=TESTS))["verdict"] == "accepted"
    async with AsyncClient(running.url) as client:
        with pytest.raises(TlsFailed, match=r"(?i)certificate"):
            await client.grade(code="1", tests=TESTS)
    async with httpx.AsyncClient() as plain:
        with pytest.raises(httpx.TransportError):
            await plain.get(running.url.replace("https", "http") + "/healthz")
        assert (await plain.get(f"{running.health}/readyz")).json() == {"status": "ready"}
        assert (await plain.post(f"{running.health}/v1/grade", json={})).status_code == 404
    assert await capabilities(running.grpc, grpc.ssl_channel_credentials((files / "ca.pem").read_bytes())) == "fake"
    with pytest.raises(grpc.aio.AioRpcError):
        await capabilities(running.grpc, None)


async def test_mtls_needs_a_client_certificate_of_the_authority(files: Path, stack: AsyncExitStack) -> None:
    authority = str(files / "ca.pem")
    running = await start(section(files, authority), stack)
    nameless = ssl.create_default_context(cafile=authority)
    async with AsyncClient(running.url, Patience(unreachable_s=0.01), tls=nameless) as client:
        with pytest.raises((TlsFailed, Unreachable)):
            await client.grade(code="1", tests=TESTS)
    named = ssl.create_default_context(cafile=authority)
    named.load_cert_chain(files / "client.pem", files / "client.key")
    async with AsyncClient(running.url, tls=named) as client:
        assert (await client.grade(code="1", tests=TESTS))["verdict"] == "accepted"
    pem = {name: (files / name).read_bytes() for name in ("ca.pem", "client.pem", "client.key")}
    with pytest.raises(grpc.aio.AioRpcError):
        await capabilities(running.grpc, grpc.ssl_channel_credentials(pem["ca.pem"]))
    known = grpc.ssl_channel_credentials(pem["ca.pem"], pem["client.key"], pem["client.pem"])
    assert await capabilities(running.grpc, known) == "fake"


def test_unusable_certificate_files_are_named(files: Path, tmp_path: Path) -> None:
    swapped = TlsSection(certificate=str(files / "service.key"), key=str(files / "service.pem"))
    missing = TlsSection(certificate=str(tmp_path / "none.pem"), key=str(files / "service.key"))
    for bad, name in ((swapped, "service.key"), (missing, "none.pem")):
        with pytest.raises(Unusable, match=name):
            http_context(bad)
    with pytest.raises(ConfigError, match="certificate and key together"):
        load_config(None, ['verifier.tls.certificate="a.pem"'])
