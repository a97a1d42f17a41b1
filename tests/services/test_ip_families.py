"""`[::]` listens for IPv4 and IPv6: gRPC with its health checks, the REST API, metrics, the pages of a run, runners."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from fastapi import FastAPI
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from tests.redis_process import free_port

from nouscoder.http_server.listener import start_http
from nouscoder.rpc.health import Health
from nouscoder.rpc.server import Served, start_grpc
from nouscoder.run.pages import open_pages

HOSTS = ("127.0.0.1", "[::1]")


@pytest.fixture(autouse=True)
def _needs_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no address ::1: {error}")


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def body_of(host: str, address: str) -> str:
    port = address.rpartition(":")[2]
    with urllib.request.urlopen(f"http://{host}:{port}/", timeout=60) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.parametrize("host", HOSTS)
async def test_a_service_answers_both_families(stack: AsyncExitStack, host: str) -> None:
    health = Health("[::]:0")
    metrics = free_port()
    served = Served("[::]:0", f"[::]:{metrics}", [], lambda _: None, CollectorRegistry(), health=health)
    address = await start_grpc(served, stack)
    assert address.startswith("[::]:")
    for listening in (address, health.bound):
        async with grpc.aio.insecure_channel(f"{host}:{listening.rpartition(':')[2]}") as channel:
            checks: Any = health_pb2_grpc.HealthStub(channel)
            answer = await checks.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert "process_cpu_seconds_total" in body_of(host, f"x:{metrics}")


async def test_the_rest_api_answers_both_families(stack: AsyncExitStack) -> None:
    address = await start_http(FastAPI(), "[::]:0", stack)
    for host in HOSTS:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await asyncio.to_thread(body_of, host, address)


def test_the_pages_of_a_run_answer_both_families(tmp_path: Path) -> None:
    with open_pages(tmp_path, "[::]:0") as address:
        for host in HOSTS:
            assert body_of(host, address)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_runner_answers_both_families(host: str, tmp_path: Path) -> None:
    agent = Path(__file__).parents[2] / "services" / "nouscoder" / "verifier" / "runner" / "__main__.py"
    port = free_port()
    settings = {"KEY": "k" * 40, "PORT": str(port), "HOME": str(tmp_path), "IDLE_S": "60"}
    environment = {**os.environ, **{f"NOUSCODER_RUNNER_{name}": value for name, value in settings.items()}}
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(agent)], env=environment, stderr=subprocess.PIPE, text=True
    ) as runner:
        try:
            assert runner.stderr is not None
            assert any("listening on port" in line for line in runner.stderr)
            socket.create_connection((host, port), timeout=60).close()
        finally:
            runner.kill()
