"""Several gateway processes as one service: shares of bounds, shared quotas and runs, merged metrics, connections."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from nouscoder.config import ConfigError, VerifierSection, load_config
from nouscoder.http_server.api_keys import Quota
from nouscoder.rpc.metrics_page import serve_on_socket
from nouscoder.verifier.access.caller import Caller
from nouscoder.verifier.access.quotas import LocalLedger, QuotaExceeded, Quotas
from nouscoder.verifier.grading.time_limits import ExclusiveRunLock
from nouscoder.verifier.processes.connections import Channel, Distributor
from nouscoder.verifier.processes.merged_metrics import MergedMetrics, SocketMetrics
from nouscoder.verifier.processes.share import ProcessNumber, section_of, slots_of
from nouscoder.verifier.processes.shared_ledger import SharedLedger
from nouscoder.verifier.processes.shared_runs import SharedRuns


@given(st.integers(1, 64), st.integers(1, 300))
def test_the_shares_add_up(number: int, num_slots: int) -> None:
    if num_slots < number:
        with pytest.raises(ConfigError, match="need as many slots"):
            slots_of(0, number, num_slots)
        return
    section = VerifierSection(max_bodies_bytes=64 * 64 * 1024**2)
    of_all = [section_of(section, ProcessNumber(index, number, Path("/")), num_slots, "h:1") for index in range(number)]
    assert sum(one.sandbox.slots for one in of_all) == num_slots
    assert min(one.sandbox.slots for one in of_all) >= 1
    for key in ("max_queue", "max_bodies_bytes", "cache_entries"):
        assert sum(getattr(one, key) for one in of_all) <= getattr(section, key)
    assert sum(one.sandbox.compile_cache_bytes for one in of_all) <= section.sandbox.compile_cache_bytes
    assert {(one.http, one.health, one.grpc_health, one.grpc) for one in of_all} == {("", "", "", "h:1")}


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ('verifier.jobs.folder="/tmp/jobs"', "jobs.folder needs verifier.processes = 1"),
        ("verifier.tools.sessions=1", "tools.sessions needs verifier.processes = 1"),
        ('verifier.sandbox.backend="gvisor"', "other than local"),
        ('verifier.sandbox.spill_over.backend="runsc"', "needs verifier.processes = 1"),
        ("verifier.sandbox.slots=1", "sandbox.slots must be at least"),
        ("verifier.max_queue=1", "max_queue must be at least"),
        ("verifier.max_bodies_bytes=8388608", "max_bodies_bytes must be at least"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_the_start(override: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, ["verifier.processes=2", override])


@pytest.fixture(params=["one process", "shared by three"])
def quotas(request: pytest.FixtureRequest, tmp_path: Path) -> list[Quotas]:
    """The quotas as three processes see them."""
    if request.param == "one process":
        return [Quotas(lambda: 0.0, LocalLedger())] * 3
    return [Quotas(lambda: 0.0, SharedLedger(tmp_path / "quotas", index, 3)) for index in range(3)]


def test_a_quota_holds_over_all_processes(quotas: list[Quotas]) -> None:
    two, five = Caller("two", quota=Quota(max_in_flight=2)), Caller("five", quota=Quota(submissions_per_minute=5))
    with quotas[0].admitted(two):
        with quotas[1].admitted(two), pytest.raises(QuotaExceeded, match="2 submissions in flight"):
            quotas[2].admitted(two).__enter__()
        with quotas[2].admitted(two):
            pass
    for number in range(5):
        with quotas[number % 3].admitted(five):
            pass
    with pytest.raises(QuotaExceeded, match="5 a minute"):
        quotas[0].admitted(five).__enter__()


def test_what_an_ended_process_had_in_flight_is_forgotten(tmp_path: Path) -> None:
    one, other = (Quotas(ledger=SharedLedger(tmp_path / "quotas", index, 2)) for index in range(2))
    caller = Caller("a", quota=Quota(max_in_flight=1))
    held = one.admitted(caller)
    held.__enter__()
    with pytest.raises(QuotaExceeded):
        other.admitted(caller).__enter__()
    SharedLedger(tmp_path / "quotas", 0, 2).clear(0)
    with other.admitted(caller):
        pass


def _admit_many(file: str, index: int, results: Any) -> None:
    quotas = Quotas(lambda: 0.0, SharedLedger(Path(file), index, 3))
    num_admitted = 0
    for _ in range(400):
        try:
            with quotas.admitted(Caller("a", quota=Quota(submissions_per_minute=500))):
                num_admitted += 1
        except QuotaExceeded:
            pass
    results.put(num_admitted)


def test_processes_at_the_same_time_admit_as_many_as_the_quota_allows(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_admit_many, args=(str(tmp_path / "q"), index, results)) for index in range(3)]
    for worker in workers:
        worker.start()
    total = sum(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(timeout=120)
    assert total == 500


@pytest.fixture
def locks(tmp_path: Path) -> list[ExclusiveRunLock]:
    """The locks of two processes."""
    return [ExclusiveRunLock(others=SharedRuns(tmp_path / "runs", index, 2)) for index in range(2)]


async def test_a_run_knows_of_the_runs_of_other_processes(locks: list[ExclusiveRunLock]) -> None:
    async with locks[0].shared() as alone:
        pass
    async with locks[0].shared() as before, locks[1].shared() as during:
        pass
    assert (alone.had_others, before.had_others, during.had_others) == (False, True, True)


async def test_an_exclusive_run_waits_for_the_runs_of_others_and_keeps_them_out(locks: list[ExclusiveRunLock]) -> None:
    events = []

    async def exclusive() -> None:
        async with locks[0].exclusive(60.0):
            events.append("exclusive begins")
            await asyncio.sleep(0.05)
            events.append("exclusive ends")

    async with locks[1].shared():
        task = asyncio.create_task(exclusive())
        while not locks[1]._others.is_closed:
            await asyncio.sleep(0)
        events.append("shared ends")
    async with locks[1].shared():
        events.append("next begins")
    await task
    assert events == ["shared ends", "exclusive begins", "exclusive ends", "next begins"]


async def test_only_one_process_has_the_turn_and_an_ended_one_blocks_nobody(tmp_path: Path) -> None:
    one, other = (SharedRuns(tmp_path / "runs", index, 2) for index in range(2))
    assert one.try_turn()
    assert not other.try_turn()
    one.give_turn()
    assert other.try_turn()
    one.entered()
    one.close(60.0)
    assert (other.num_running, other.is_closed) == (1, True)
    other.clear(0)
    assert (other.num_running, other.is_closed) == (0, False)
    one.close(-1.0)
    assert not other.is_closed, "its time is over"


def registry_of(number: int, verdicts: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    counter = Counter("done", "Done", ["kind"], registry=registry)
    counter.labels("right").inc(verdicts)
    Histogram("took_seconds", "Took", buckets=(1, 2), registry=registry).observe(number)
    Gauge("waiting", "Waiting", registry=registry).set(number)
    Gauge("queue_oldest_age_seconds", "Age", registry=registry).set(number)
    Gauge("process_start_time_seconds", "Start", registry=registry).set(100 + number)
    return registry


def test_metrics_are_merged_and_no_counter_falls_when_a_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics-0"
    sources: dict[int, Collector] = {0: SocketMetrics(path), 1: registry_of(2, 10)}
    merged = MergedMetrics(sources)
    registry = CollectorRegistry()
    registry.register(merged)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    with SocketStack() as stack:
        serve_on_socket(registry_of(1, 5), path, stack)
        assert value("done_total", kind="right") == 15
        assert value("took_seconds_bucket", le="1.0") == 1
        assert (value("took_seconds_count"), value("took_seconds_sum")) == (2, 3)
        assert (value("waiting"), value("queue_oldest_age_seconds"), value("process_start_time_seconds")) == (3, 2, 101)
    assert value("done_total", kind="right") == 15, "a process that does not answer"
    merged.ended(0)
    assert (value("done_total", kind="right"), value("waiting")) == (15, 2)
    with SocketStack() as stack:
        serve_on_socket(registry_of(1, 1), path, stack)
        assert value("done_total", kind="right") == 16
        assert b'done_total{kind="right"} 16.0' in generate_latest(registry)


class SocketStack:
    """An AsyncExitStack outside of a loop."""

    def __enter__(self) -> AsyncExitStack:
        self._stack = AsyncExitStack()
        return self._stack

    def __exit__(self, *_: object) -> None:
        asyncio.run(self._stack.aclose())


class Receiver(Channel):
    """Keeps what it is given. Its connections stay open. It has no process."""

    def __init__(self, limit: float = math.inf) -> None:  # no socket either
        self.given: list[socket.socket] = []
        self._limit = limit

    @property
    def num_open(self) -> int:
        return len(self.given)

    def pass_on(self, connection: socket.socket) -> bool:
        if self.num_open >= self._limit:
            return False
        self.given.append(connection.dup())
        return True


@asynccontextmanager
async def distributing(receivers: list[Receiver]) -> AsyncIterator[tuple[str, int]]:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    distributor = Distributor(listening, lambda: receivers)
    distributor.start()
    yield listening.getsockname()
    distributor.close()
    for receiver in receivers:
        for connection in receiver.given:
            connection.close()


async def test_connections_go_to_the_process_with_the_fewest() -> None:
    receivers = [Receiver(), Receiver(), Receiver(limit=0)]
    async with distributing(receivers) as address, AsyncExitStack() as stack:
        for number in range(9):
            _, writer = await asyncio.open_connection(*address)
            stack.callback(writer.close)
            while sum(one.num_open for one in receivers) <= number:
                await asyncio.sleep(0)
    assert sorted(one.num_open for one in receivers) == [0, 4, 5]


async def test_connections_wait_while_no_process_takes_calls() -> None:
    receivers: list[Receiver] = []
    async with distributing(receivers) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"early")
        for _ in range(10):
            await asyncio.sleep(0)
        receivers.append(one := Receiver())
        async with asyncio.timeout(120):
            while not one.given:
                await asyncio.sleep(0.01)
        assert not reader.at_eof(), "it was not closed while nobody took it"
        (given,) = one.given
        given.setblocking(True)
        given.settimeout(120)
        assert given.recv(64) == b"early"
        writer.close()
