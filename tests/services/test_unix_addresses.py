"""unix:PATH as the address of a service and of its metrics: the sockets of a local run."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from nouscoder.learner.publication.sender import _host_of
from nouscoder.rpc.addresses import AddressError, unix_address, unix_path
from nouscoder.rpc.metrics_page import read_metrics
from nouscoder.rpc.server import Served, start_grpc
from nouscoder.run.watch import read_counter

# Leaves the file of its socket behind, as a killed process does.
_KILLED = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(1)"


def served(folder: Path, registry: CollectorRegistry, name: str = "one") -> Served:
    grpc, metrics = (unix_address(folder / f"{name}.{kind}") for kind in ("sock", "metrics"))
    return Served(grpc, metrics, ["test.Service"], lambda server: None, registry)


async def state_at(address: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        checks: Any = health_pb2_grpc.HealthStub(channel)
        answer = await checks.Check(health_pb2.HealthCheckRequest(), timeout=60)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_a_service_and_its_metrics_answer_on_sockets(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Counter("things", "Things", registry=registry).inc(3)
    async with AsyncExitStack() as stack:
        what = served(tmp_path, registry)
        assert await start_grpc(what, stack) == what.address
        assert await state_at(what.address) == "SERVING"
        assert read_counter(what.metrics_address, "things") == 3
        with pytest.raises(AddressError, match=r"cannot listen on unix:.*one\.sock: another process listens there"):
            await start_grpc(served(tmp_path, CollectorRegistry()), stack)
        assert await state_at(what.address) == "SERVING", "the second one took nothing away"
    assert read_counter(what.metrics_address, "things") is None


async def test_the_sockets_of_a_killed_process_are_taken_over(tmp_path: Path) -> None:
    what = served(tmp_path, CollectorRegistry())
    for address in (what.address, what.metrics_address):
        subprocess.run([sys.executable, "-c", _KILLED, str(unix_path(address))], check=True, timeout=60)
    async with AsyncExitStack() as stack:
        await start_grpc(what, stack)
        assert await state_at(what.address) == "SERVING"
        assert "process_cpu_seconds_total" in read_metrics(what.metrics_address)


async def test_a_socket_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(AddressError, match="cannot listen on unix:"):
            await start_grpc(served(tmp_path / "none", CollectorRegistry()), stack)


def test_a_transfer_of_a_learner_on_a_socket_is_on_loopback() -> None:
    assert [_host_of(address) for address in ("unix:/run/learner.sock", "10.0.0.1:50054")] == ["127.0.0.1", "10.0.0.1"]
