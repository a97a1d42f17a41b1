"""The broker over gRPC: the whole loop through the workers' client, errors as status codes, metrics, light imports."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from nouscoder.broker import errors
from nouscoder.broker.core import Broker
from nouscoder.broker.metrics import BrokerCollector
from nouscoder.broker.process import serve_broker
from nouscoder.broker.servicer import STATUS_CODES
from nouscoder.broker.streams import read_oldest_s
from nouscoder.domain.lease import Lease, LeaseLoss, WorkReport
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.body import digest_of
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerBehind, PeerRefused, PeerUnreachable, open_channel
from nouscoder.rpc.worker import LeaseKeeper
from nouscoder.store.record_store import ByteRange
from nouscoder.store.rollout_record import decode_rollout
from nouscoder.store.tests import UnknownTests
from nouscoder.store.tests_cache import TestsCache


@dataclass
class Service:
    broker: Broker
    address: str
    connect: Callable[[str], Any]


@pytest.fixture
async def service(broker_rig: Any) -> AsyncIterator[Service]:
    config = broker_rig.config("broker.grpc=127.0.0.1:0", "broker.lease_s=1")
    broker = broker_rig.broker(config)
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker, config, asyncio.Event(), stack)

        async def connect(name: str) -> BrokerClient:
            return await stack.enter_async_context(BrokerClient(address, name, patience_s=2))

        yield Service(broker, address, connect)


async def test_the_broker_logs_how_many_leases_a_worker_gave_back_when_it_stopped(
    service: Service, broker_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nouscoder.broker.servicer")
    await service.broker.publish_policy(broker_rig.manifest(0))
    worker = await service.connect("generation-h-0-1")
    held = [item.lease.lease_id for item in (await worker.lease_tasks(3)).tasks]
    await worker.release_leases(held[:1])
    assert not caplog.records, "a lease given back alone ends no worker"
    await worker.release_leases()
    assert [vars(one)["leases_given_back"] for one in caplog.records] == [2]
    assert [vars(one)["worker_id"] for one in caplog.records] == ["generation-h-0-1"]


async def test_the_whole_life_of_a_rollout_goes_through_the_client(
    service: Service, broker_rig: Any, tmp_path: Path
) -> None:
    generation, verifier, learner = [
        await service.connect(f"{name}-h-0-1") for name in ("generation", "verifier", "learner")
    ]
    assert await learner.publish_policy(broker_rig.manifest(0)) == 0
    leased = (await generation.lease_tasks(100)).tasks
    asked = {(item.task.problem_id, item.task.prompt, item.task.prompt_template) for item in leased}
    assert asked <= {(p.problem_id, p.prompt, p.prompt_template) for p in broker_rig.problems}
    sent = {item.task.rollout_id: broker_rig.rollout(item.task) for item in leased}
    assert await generation.submit_rollouts([(item.lease.lease_id, sent[item.task.rollout_id]) for item in leased]) == (
        frozenset()
    )
    gradings = (await verifier.lease_grading(100)).gradings
    assert {item.text for item in gradings} == {rollout.text for rollout in sent.values()}
    problem = next(p for p in broker_rig.problems if p.problem_id == gradings[0].problem_id)
    assert (gradings[0].tests_digest, gradings[0].rules) == (digest_of(problem.tests), problem.grading_rules())
    cache = TestsCache(tmp_path, 1024**2)
    async with cache.opened(gradings[0].tests_digest, verifier) as tests:
        assert tests.cases[0] == problem.tests.cases[0]
    cache.close()
    verdicts = [
        (item.lease.lease_id, item.rollout_id, broker_rig.verdict(broker_rig.mixed(item.rollout_id)))
        for item in gradings
    ]
    assert await verifier.submit_verdicts(verdicts) == frozenset()
    batch = (await learner.lease_batch()).batch
    assert batch is not None
    ranges = [ByteRange(recorded.record, 0, recorded.header.record_bytes) for recorded in batch.rollouts]
    records = [data async for _, data in learner.stream_records(ranges)]
    for recorded, record in zip(batch.rollouts, records, strict=True):
        assert decode_rollout(record) == sent[recorded.header.rollout_id]
    assert await learner.commit_batch(batch.batch_id, 4) is False
    assert await learner.commit_batch(batch.batch_id, 4) is True
    status = await learner.status()
    assert (status.ledger.trained, status.ledger.balanced, status.policy_version, status.step) == (8, True, 0, 4)
    assert (status.rollouts_accepted, status.rollouts_graded) == (8, 16)
    assert status == await service.broker.status()
    ledger = await learner.finish_run("done")
    assert (ledger.abandoned, ledger.balanced) == (8, True)
    assert (await generation.lease_tasks(1)).run_finished


async def test_each_error_of_the_tree_has_its_status_code() -> None:
    tree = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.BrokerError)]
    assert set(tree) <= set(STATUS_CODES)


async def test_what_is_refused_says_why_and_what_is_away_is_unavailable(service: Service, broker_rig: Any) -> None:
    client = await service.connect("learner-h-0-1")
    with pytest.raises(PeerBehind, match="0 comes next"):
        await client.publish_policy(broker_rig.manifest(3))
    for digest in ("nope", "sha256:" + "0" * 64):
        with pytest.raises(UnknownTests, match=r"is no digest|are kept here"):
            await anext(client.fetch(digest))
    with pytest.raises(PeerRefused, match="batch 5 is not leased"):
        await client.commit_batch(5, 1)
    with pytest.raises(PeerRefused, match="worker_id"):
        await (await service.connect("")).lease_tasks(1)
    gone = BrokerClient("127.0.0.1:1", "learner-h-0-1", patience_s=0.3)
    async with gone:
        with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1:1"):
            await gone.status()


async def test_a_redis_that_is_away_is_unavailable_with_a_sentence(broker_rig: Any) -> None:
    config = broker_rig.config("broker.grpc=127.0.0.1:0")
    broker = Broker(config, "unix:///nonexistent/redis.sock", broker_rig.index)
    async with AsyncExitStack() as stack:
        address = await serve_broker(broker, config, asyncio.Event(), stack)
        client = await stack.enter_async_context(BrokerClient(address, "learner-h-0-1", patience_s=0))
        with pytest.raises(PeerUnreachable) as caught:
            await client.status()
        assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
        assert "Redis at unix:///nonexistent/redis.sock does not answer" in (caught.value.__cause__.details() or "")


async def test_a_watcher_hears_of_the_newest_policy_and_of_each_newer_one(service: Service, broker_rig: Any) -> None:
    client = await service.connect("generation-h-0-1")
    for version in range(3):
        await client.publish_policy(broker_rig.manifest(version))
    watched = client.watch_policy()
    assert (await asyncio.wait_for(anext(watched), 60)) == broker_rig.manifest(2)
    await client.publish_policy(broker_rig.manifest(3))
    assert (await asyncio.wait_for(anext(watched), 60)) == broker_rig.manifest(3)


async def test_a_kept_lease_lives_and_a_lost_one_is_reported(service: Service, broker_rig: Any) -> None:
    client = await service.connect("generation-h-0-1")
    await client.publish_policy(broker_rig.manifest(0))
    kept, lost, dropped = (await client.lease_tasks(3)).tasks
    async with client.keep_leases() as keeper:
        for item in (kept, lost, dropped):
            keeper.add(item.lease)
        keeper.drop(dropped.lease.lease_id)
        await service.broker.store.run("heartbeat", "generation-h-0-1")  # an empty beat is fine
        # The entry goes to another worker behind the keeper's back.
        entry = lost.lease.lease_id.split(":")[1]
        tasks = service.broker.store.prefix + "tasks"
        await service.broker.store.redis.xclaim(tasks, "workers", "generation-h-1-1", 0, [entry])
        told: dict[str, LeaseLoss] = {}
        async with asyncio.timeout(60):
            while not told:
                await asyncio.sleep(0.05)
                told = keeper.take_lost()
        assert told == {lost.lease.lease_id: LeaseLoss.EXPIRED}
        assert keeper.take_lost() == {}
        assert set(keeper._kept) == {kept.lease.lease_id}


async def test_a_keeper_beats_for_nothing_that_was_dropped_or_lost() -> None:
    beaten: list[list[str]] = []

    async def heartbeat(lease_ids: Any, report: WorkReport | None = None) -> dict[str, LeaseLoss]:
        beaten.append(sorted(lease_ids))
        return {"lost": LeaseLoss.EXPIRED}

    async with LeaseKeeper(heartbeat) as keeper:
        for name in ("kept", "lost", "dropped"):
            keeper.add(Lease(name, expires_in_s=0.06, delivery=1))
        keeper.drop("dropped")
        async with asyncio.timeout(60):
            while len(beaten) < 2:
                await asyncio.sleep(0.01)
    assert beaten[0] == ["kept", "lost"]
    assert beaten[1] == ["kept"]


async def test_health_says_serving(service: Service) -> None:
    async with open_channel(service.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "nouscoder.v1.BrokerService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_metrics_tell_the_ledger_and_go_silent_without_redis(
    new_broker: Callable[..., Broker], broker_rig: Any
) -> None:
    broker = new_broker()
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker, 5)
    await broker_rig.grade(broker, lambda i: VerdictKind.INTERNAL_ERROR if i == "g000000-0" else broker_rig.mixed(i))
    registry = CollectorRegistry()
    collector = BrokerCollector()
    registry.register(collector)
    assert generate_latest(registry) == b""
    collector.latest = await broker.status()
    collector.oldest_s = await read_oldest_s(broker.store)
    page = generate_latest(registry).decode()
    states = re.findall(r"nouscoder_broker_ledger_rollouts{[^}]*} ([0-9.]+)", page)
    assert sum(map(float, states)) == 8  # those admitted, each once
    ages = re.findall(r'nouscoder_broker_oldest_age_seconds{stream="(\w+)"} ([0-9.e-]+)', page)
    assert [(stream, 0 <= float(age) < 3600) for stream, age in ages] == [("tasks", True), ("grading", True)]
    for line in (
        "nouscoder_broker_admitted_rollouts_total 8.0",
        'nouscoder_broker_ledger_rollouts{state="queued"} 3.0',
        'nouscoder_broker_ledger_rollouts{state="sampled"} 1.0',
        'nouscoder_broker_ledger_rollouts{state="graded"} 4.0',
        'nouscoder_broker_ledger_rollouts{state="trained"} 0.0',
        "nouscoder_broker_ledger_balanced 1.0",
        'nouscoder_broker_stream_lag{stream="tasks"} 3.0',
        'nouscoder_broker_pending_leases{stream="grading"} 0.0',
        'nouscoder_broker_dead_letters_total{stream="grading"} 0.0',
        'nouscoder_broker_redeliveries_total{stream="grading"} 1.0',
        "nouscoder_broker_admission_slots_free 8.0",
        "nouscoder_broker_policy_version 0.0",
    ):
        assert line in page.splitlines(), line


async def test_the_age_of_work_is_that_of_the_oldest_unfinished_entry(
    new_broker: Callable[..., Broker], broker_rig: Any
) -> None:
    broker = new_broker()
    assert await read_oldest_s(broker.store) == {"tasks": 0, "grading": 0}
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker, 5)
    redis: Any = broker.store.redis
    key = f"{broker.store.prefix}grading"
    ((entry, _),) = await redis.xrange(key, count=1)
    seconds, _ = await redis.time()
    old = await read_oldest_s(broker.store)
    assert abs(int(seconds) - int(entry.decode().partition("-")[0]) / 1000 - old["grading"]) < 60
    await redis.xadd(f"{broker.store.prefix}tasks", {"rollout": "x"}, id=f"{(int(seconds) + 5000) * 1000}-0")
    await redis.xtrim(f"{broker.store.prefix}tasks", maxlen=1, approximate=False)
    assert (await read_oldest_s(broker.store))["tasks"] == 0  # the clock of Redis went back


def test_the_broker_and_its_client_load_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, nouscoder.broker.process, nouscoder.rpc.broker_client;"
        "print([m for m in ('torch', 'transformers', 'numpy', 'fastapi') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"
