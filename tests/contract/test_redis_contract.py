"""One suite for every Redis that this machine has (tests/redis_process.py).

Each script of the broker runs on it, its errors are known by kind, and a run lives behind TLS, as a user with few
permissions, and on a node of a cluster.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis import exceptions
from tests.certificates import make_certificate
from tests.redis_process import RedisProcess, free_port, installed_servers, until
from tests.services.conftest import BrokerRig
from tests.services.test_redis_forgets import BookKeeper, check, work

from nouscoder.broker.core import Broker
from nouscoder.broker.curriculum import restore_state
from nouscoder.broker.errors import BrokerUnavailable
from nouscoder.broker.store import Value
from nouscoder.broker.streams import read_oldest_s
from nouscoder.domain.learner_state import RunIdentity, TrainedGroups, TrainedState
from nouscoder.domain.partial import EncodedPiece
from nouscoder.domain.run_status import RunMode
from nouscoder.domain.verdict import VerdictKind

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem for path in (ROOT / "services/nouscoder/broker/lua").glob("*.lua")} - {"common"}
GEN, LEARNER = "generation-h-0-1", "learner-1"
SERVERS = installed_servers()


@pytest.fixture(scope="module", params=[*SERVERS.values()], ids=[*SERVERS])
def binary(request: pytest.FixtureRequest) -> str:
    path: str = request.param
    return path


@pytest.fixture(scope="module")
def server(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(binary, tmp_path_factory.mktemp("redis"), "--save", "") as started:
        yield started


@pytest.fixture(scope="module")
def rig(server: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> BrokerRig:
    return BrokerRig(server.url, tmp_path_factory.mktemp("problems"))


@asynccontextmanager
async def broker_at(url: str, rig: BrokerRig, *overrides: str) -> AsyncIterator[Broker]:
    broker = Broker(rig.config("broker.pipeline_k=4", "broker.max_regrades=1", *overrides), url, rig.index)
    try:
        yield broker
    finally:
        await broker.close()


async def live(broker: Broker, rig: BrokerRig) -> None:
    """A run from its beginning to its end, with everything that workers and operators can do."""
    operations = broker.operations
    assert (await broker.status()).policy_version is None
    await broker.restore_run(TrainedState(RunIdentity("ab" * 16, "/runs/test", 0, 4), 0, 0, 0, TrainedGroups(), None))
    await broker.publish_policy(rig.manifest(0))
    await rig.sample(broker, 12)
    for _ in range(2):
        await rig.grade(
            broker, lambda name: VerdictKind.INTERNAL_ERROR if name.startswith("g000002") else rig.mixed(name)
        )
    letters = await operations.dead_letters()
    assert len(letters) == 3
    assert (await operations.remove_dead_letters([letters[0].letter_id], requeue=True))[0] == 1

    assert min((await read_oldest_s(broker.store)).values()) >= 0
    held = (await broker.lease_tasks(GEN, 4, 0)).tasks
    assert await broker.heartbeat(GEN, [item.lease.lease_id for item in held], [1] * 4) == {}
    assert await broker.partials.keep(GEN, [EncodedPiece(held[0].lease.lease_id, 0, 5, 0, 0, bytes(40))]) == [5]
    assert await broker.partials.read(held[0].task.rollout_id) == bytes(40)
    assert await broker.release_leases(GEN) == 4
    held = (await broker.lease_tasks(GEN, 4, 0)).tasks
    await broker.store.run("tick", "test", 0, 10_000_000)
    assert await broker.store.run("sweep", 100) == 4
    assert len(await broker.heartbeat(GEN, [item.lease.lease_id for item in held])) == 4

    assert (await broker.lease_batch(LEARNER, 0)).batch is not None
    for _ in range(3):
        await operations.report_batch_failure(0, "the loss is NaN")
    assert await operations.drop_batch(0) == 8
    held = await rig.sample(broker, 12)
    await rig.grade(broker, rig.mixed)
    assert (await broker.lease_batch(LEARNER, 0)).batch is not None
    assert await broker.commit_batch(0, 1) is False
    assert await broker.publish_policy(rig.manifest(1)) == 1

    await operations.set_mode(RunMode.PAUSED)
    assert [blocker.cause for blocker in await broker.why_stalled()] == ["paused"]
    await operations.set_mode(RunMode.RUNNING)
    await restore_state(broker.store, await broker.read_curriculum())
    (item, *_) = (await broker.lease_tasks(GEN, 4, 0)).tasks
    assert await broker.store.run("drop_groups", item.task.group_id, item.task.problem_id) == 4
    await broker.records.delete_garbage()
    left = (await broker.lease_tasks(GEN, 4, 0)).tasks[0]
    assert await broker.release_leases(GEN, [left.lease.lease_id], abandoned=True) == 1
    refused = (await broker.lease_tasks(GEN, 4, 0)).tasks[0]
    assert await broker.release_leases(GEN, [refused.lease.lease_id], "too long") == 4
    await broker.finish_run("over")
    assert await broker.continue_run()
    ledger = await broker.finish_run("over")
    assert ledger.balanced
    assert ledger.trained == 8
    assert sum(ledger.in_flight.values()) == 0


async def test_a_whole_run_uses_every_script(server: RedisProcess, rig: BrokerRig) -> None:
    async with broker_at(server.url, rig) as broker:
        used, call = set(), broker.store._call

        async def noted(script: str, values: tuple[Value, ...]) -> Any:
            used.add(script)
            return await call(script, values)

        broker.store._call = noted  # type: ignore[method-assign]
        await live(broker, rig)
    assert used == SCRIPTS


async def test_a_wiped_redis_gets_back_what_was_trained_on(server: RedisProcess, rig: BrokerRig) -> None:
    async with broker_at(server.url, rig) as broker:
        learner = BookKeeper(broker, rig)
        await learner.begin()
        for wiped in (False, True, False):
            if wiped:
                server.ask("FLUSHALL")
                server.ask("SCRIPT", "FLUSH")
                assert not await learner.train()
            await work(learner, rig)
            assert await learner.train()
            check(learner, await broker.status())
        assert learner.num_restored == 1


# ---- errors, as this version answers them ----


@contextmanager
def full(server: RedisProcess) -> Iterator[None]:
    server.ask("CONFIG", "SET", "maxmemory", 1)
    yield
    server.ask("CONFIG", "SET", "maxmemory", 0)


@contextmanager
def without_replicas(server: RedisProcess) -> Iterator[None]:
    server.ask("CONFIG", "SET", "min-replicas-to-write", 1)
    yield
    server.ask("CONFIG", "SET", "min-replicas-to-write", 0)


@contextmanager
def a_replica(server: RedisProcess) -> Iterator[None]:
    server.ask("REPLICAOF", "127.0.0.1", 1)
    yield
    server.ask("REPLICAOF", "NO", "ONE")


@contextmanager
def a_replica_that_lost_its_master(server: RedisProcess) -> Iterator[None]:
    server.ask("CONFIG", "SET", "replica-serve-stale-data", "no")
    with a_replica(server):
        yield
    server.ask("CONFIG", "SET", "replica-serve-stale-data", "yes")


@contextmanager
def unable_to_save(server: RedisProcess) -> Iterator[None]:
    server.ask("CONFIG", "SET", "save", "3600 1")
    (server.folder / "dump.rdb").mkdir()
    server.ask("BGSAVE")
    until(lambda: server.ask("INFO", "persistence")["rdb_last_bgsave_status"] == "err", "the file is not saved")
    yield
    server.ask("CONFIG", "SET", "save", "")
    (server.folder / "dump.rdb").rmdir()


@contextmanager
def busy(server: RedisProcess) -> Iterator[None]:
    server.ask("CONFIG", "SET", "lua-time-limit", 1)

    def loop() -> None:
        with suppress(redis.RedisError):
            server.ask("EVAL", "while true do end", 0)

    thread = threading.Thread(target=loop)
    thread.start()
    until(lambda: _is_busy(server), "the script runs")
    yield
    server.ask("SCRIPT", "KILL")
    thread.join(60)


def _is_busy(server: RedisProcess) -> bool:
    try:
        server.ask("PING")
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


Trouble = Callable[[RedisProcess], AbstractContextManager[None]]
# What begins it, what the broker says, and what why-stalled says; empty when Redis answers nothing then.
TROUBLES: list[tuple[Trouble, str, str]] = [
    (full, r"is full \(maxmemory\)", "redis_full"),
    (without_replicas, "NOREPLICAS", "redis_read_only"),
    (a_replica, "READONLY", "redis_read_only"),
    (a_replica_that_lost_its_master, "MASTERDOWN", ""),
    (unable_to_save, "MISCONF", "redis_cannot_save"),
    (busy, "BUSY", ""),
]


@pytest.mark.parametrize(("trouble", "sentence", "cause"), TROUBLES, ids=[row[0].__name__ for row in TROUBLES])
async def test_a_trouble_of_redis_is_known_by_its_kind_and_passes(
    server: RedisProcess, rig: BrokerRig, trouble: Trouble, sentence: str, cause: str
) -> None:
    async with broker_at(server.url, rig) as broker:
        await broker.publish_policy(rig.manifest(0))
        held = (await broker.lease_tasks(GEN, 4, 0)).tasks
        submitted = [rig.sampled(item) for item in held]
        with trouble(server):
            with pytest.raises(BrokerUnavailable, match=sentence):
                await broker.submit_rollouts(GEN, submitted)
            if cause:
                assert [blocker.cause for blocker in await broker.why_stalled()] == [cause]
        assert await broker.why_stalled() == ()
        assert await broker.submit_rollouts(GEN, submitted) == []


@pytest.mark.soak
async def test_a_redis_that_loads_its_file_is_unavailable(binary: str, tmp_path: Path, rig: BrokerRig) -> None:
    with RedisProcess(binary, tmp_path, "--save", "", "--rdbcompression", "no") as first:
        for number in range(30):  # Redis answers once for each 2 MiB that it loads, and then waits for 2 s
            first.ask("SET", f"filler {number}", "x" * 2_200_000)
        first.ask("SAVE")
    with RedisProcess(binary, tmp_path, "--key-load-delay", "2000000") as loading:
        async with broker_at(loading.url, rig) as broker:
            with pytest.raises(BrokerUnavailable, match="LOADING"):
                await broker.publish_policy(rig.manifest(0))


# ---- how a Redis is reached ----


async def test_a_user_with_few_permissions_can_serve_a_run(server: RedisProcess, rig: BrokerRig) -> None:
    """The rule of docs/redis-keys.md."""
    document = (ROOT / "docs" / "redis-keys.md").read_text(encoding="utf8")
    (rule,) = [line for line in document.splitlines() if line.startswith("ACL SETUSER")]
    server.ask(*rule.replace("PASSWORD", "secret").split())
    async with broker_at(server.url.replace("//", "//nouscoder:secret@"), rig) as broker:
        await live(broker, rig)
        assert (await broker.store.pressure()).used > 0
        with pytest.raises(exceptions.NoPermissionError):
            await broker.store.redis.flushall()
        with pytest.raises(exceptions.NoPermissionError):
            await broker.store.redis.get("another:key")
    async with broker_at(server.url.replace("//", "//nouscoder:wrong@"), rig) as broker:
        with pytest.raises(BrokerUnavailable, match="does not accept the user or password"):
            await broker.status()


async def test_all_keys_of_a_run_are_in_one_slot_of_a_cluster(binary: str, tmp_path: Path, rig: BrokerRig) -> None:
    """The node serves no other slot, so a command or script that used a key outside of it would fail."""
    with RedisProcess(binary, tmp_path, "--save", "", "--cluster-enabled", "yes") as node:
        async with broker_at(node.url, rig) as broker:
            with pytest.raises(BrokerUnavailable, match="CLUSTERDOWN"):
                await broker.publish_policy(rig.manifest(0))
            slot = node.ask("CLUSTER", "KEYSLOT", f"{broker.store.prefix}meta")
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
            node.ask("CLUSTER", "ADDSLOTS", slot)
            await asyncio.to_thread(
                until, lambda: "cluster_state:ok" in _text(node.ask("CLUSTER", "INFO")), "it serves"
            )
            await live(broker, rig)
            assert node.ask("CLUSTER", "COUNTKEYSINSLOT", slot) == node.ask("DBSIZE") > 0


def _text(answer: Any) -> str:
    if isinstance(answer, dict):
        return "\n".join(f"{key}:{value}" for key, value in answer.items())
    return answer.decode() if isinstance(answer, bytes) else str(answer)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def test_a_run_lives_behind_mutual_tls(
    binary: str, server: RedisProcess, rig: BrokerRig, certificate: Path, tmp_path: Path
) -> None:
    async with tls_port(binary, server, certificate, tmp_path) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}/ca.crt"
        ours = f"&ssl_certfile={certificate}/tls.crt&ssl_keyfile={certificate}/tls.key"
        async with broker_at(url + ours, rig) as broker:
            await live(broker, rig)
        async with broker_at(url, rig) as broker:
            with pytest.raises(BrokerUnavailable, match="does not answer"):
                await broker.status()
        async with broker_at(f"rediss://127.0.0.1:{port}/0?{ours[1:]}", rig) as broker:
            with pytest.raises(BrokerUnavailable, match=r"does not answer: .*certificate"):
                await broker.status()


@asynccontextmanager
async def tls_port(binary: str, server: RedisProcess, certificate: Path, folder: Path) -> AsyncIterator[int]:
    """A port with TLS that wants a certificate: of this Redis if it was built with TLS, else of a proxy before it."""
    port, ca, own, key = free_port(), certificate / "ca.crt", certificate / "tls.crt", certificate / "tls.key"
    files = ["--tls-ca-cert-file", str(ca), "--tls-cert-file", str(own), "--tls-key-file", str(key)]
    with RedisProcess(binary, folder, "--save", "", "--tls-port", str(port), *files) as encrypted:
        if encrypted.process.poll() is None:
            yield port
            return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
    context.load_cert_chain(own, key)
    context.verify_mode = ssl.CERT_REQUIRED

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(_copy(reader, to_redis), _copy(from_redis, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", port, ssl=context):
        yield port


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
