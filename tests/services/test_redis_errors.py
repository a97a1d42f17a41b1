"""Which answers of Redis pass, in every form in which a version of Redis and the client library give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis import exceptions
from redis._parsers.base import BaseParser

from nouscoder.bench.forgetful_redis import ForgetfulRedis
from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerError, BrokerUnavailable, RedisFull
from nouscoder.broker.redis_client import open_client
from nouscoder.broker.store import Pressure
from nouscoder.errors import Unusable
from nouscoder.store.redis_records import PASSING, kind_of

# What Redis 6.2 and 7.0 say, copied from their answers.
SENTENCES = {
    "LOADING": "Redis is loading the dataset in memory",
    "BUSY": "Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "MISCONF": "Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "OOM": "command not allowed when used memory > 'maxmemory'.",
    "READONLY": "You can't write against a read only replica.",
    "MASTERDOWN": "Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "NOREPLICAS": "Not enough good replicas to write.",
    "UNBLOCKED": "force unblock from blocking operation, instance state changed (master -> replica?)",
    "TRYAGAIN": "Multiple keys request during rehashing of slot",
    "CLUSTERDOWN": "The cluster is down",
    "NOSCRIPT": "No matching script. Please use EVAL.",
    "NOGROUP": "No such key 'nouscoder:{run}:tasks' or consumer group 'workers' in XREADGROUP with GROUP option",
}
FORMS: dict[str, Callable[[str, str], str]] = {
    "a command": lambda kind, sentence: f"{kind} {sentence}",
    "in a script of Redis 6": lambda kind, sentence: (
        f"ERR Error running script (call to f_a2265e14): @user_script:1: @user_script: 1: -{kind} {sentence}"
    ),
    "in a script of Redis 6, without a sign": lambda kind, sentence: (
        f"ERR Error running script (call to f_28378647): @user_script:210: {kind} {sentence}"
    ),
    "in a script of Redis 7": lambda kind, sentence: f"{kind} {sentence} script: a2265e14, on @user_script:1.",
}


def as_raised(answer: str) -> Exception:
    """The exception that the client library makes of an answer."""
    error: Exception = BaseParser.parse_error(answer)  # type: ignore[no-untyped-call]
    return error


def test_the_table_has_every_kind_that_passes() -> None:
    assert set(SENTENCES) == PASSING


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", SENTENCES)
def test_an_answer_that_passes_is_known_in_every_form(
    new_broker: Callable[..., Broker], kind: str, form: Callable[[str, str], str]
) -> None:
    error = as_raised(form(kind, SENTENCES[kind]))
    assert kind_of(error) == kind
    mapped = new_broker().store._mapped(error)  # type: ignore[arg-type]
    assert isinstance(mapped, BrokerUnavailable)
    assert isinstance(mapped, RedisFull) == (kind == "OOM")


@pytest.mark.parametrize(
    ("answer", "kind", "sentence"),
    [
        ("NOPERM this user has no permissions to run the 'eval' command", "NOPERM", "lacks a permission"),
        ("MOVED 3999 127.0.0.1:6381", "MOVED", "a node of a cluster"),
        ("ERR unknown command 'XADD'", "ERR", "answered: unknown command"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "WRONGTYPE", "answered"),
    ],
)
def test_an_answer_that_does_not_pass_is_not_tried_again(
    new_broker: Callable[..., Broker], answer: str, kind: str, sentence: str
) -> None:
    error = as_raised(answer)
    assert kind_of(error) == kind
    mapped = new_broker().store._mapped(error)  # type: ignore[arg-type]
    assert type(mapped) is BrokerError
    assert sentence in str(mapped)


def test_a_wrong_password_and_a_connection_that_breaks_pass(new_broker: Callable[..., Broker]) -> None:
    store = new_broker().store
    wrong = as_raised("WRONGPASS invalid username-password pair or user is disabled.")
    assert "does not accept the user or password" in str(store._mapped(wrong))  # type: ignore[arg-type]
    for error in (exceptions.ConnectionError("Connection reset"), TimeoutError(), exceptions.TimeoutError()):
        assert isinstance(store._mapped(error), BrokerUnavailable)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ForgetfulRedis]:
    server = ForgetfulRedis(tmp_path / "redis")
    yield server
    server.close()


@pytest.fixture
def settings(own: ForgetfulRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own.url) as client:
        yield client


async def test_a_redis_that_may_not_write_is_unavailable_and_goes_on_afterwards(
    own: ForgetfulRedis, settings: redis.Redis, broker_rig: Any
) -> None:
    broker = Broker(broker_rig.config(), own.url, broker_rig.index)
    await broker.publish_policy(broker_rig.manifest(0))
    settings.config_set("min-replicas-to-write", 1)
    with pytest.raises(BrokerUnavailable, match="NOREPLICAS"):
        await broker.publish_policy(broker_rig.manifest(1))
    settings.config_set("min-replicas-to-write", 0)
    settings.replicaof("127.0.0.1", 1)
    with pytest.raises(BrokerUnavailable, match="READONLY"):
        await broker.publish_policy(broker_rig.manifest(1))
    settings.replicaof("NO", "ONE")
    assert await broker.publish_policy(broker_rig.manifest(1)) == 1
    await broker.close()


async def test_a_full_redis_takes_no_rollout_and_everything_that_frees_memory(
    own: ForgetfulRedis, settings: redis.Redis, broker_rig: Any
) -> None:
    """Redis refuses whatever may grow memory; grading, batches, commits, heartbeats and deletion go on."""
    broker = Broker(broker_rig.config("broker.pipeline_k=3"), own.url, broker_rig.index)
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker, 16)
    held = (await broker.lease_tasks("generation-h-0-1", 4, 0)).tasks
    settings.config_set("maxmemory", 1)
    with pytest.raises(redis.OutOfMemoryError):
        settings.set("anything", "new")

    late = [broker_rig.sampled(item) for item in held]
    with pytest.raises(RedisFull, match=r"is full \(maxmemory\)"):
        await broker.submit_rollouts("generation-h-0-1", late)
    assert await broker.heartbeat("generation-h-0-1", [item.lease.lease_id for item in held]) == {}
    await broker_rig.grade(broker, broker_rig.mixed)
    for batch_id in range(2):
        assert (await broker.lease_batch("learner-1", 0)).batch is not None
        assert await broker.commit_batch(batch_id, batch_id + 1) is False
        assert await broker.publish_policy(broker_rig.manifest(batch_id + 1)) == batch_id + 1
    await broker.store.run("tick", "test", 0, 1000)
    await broker.store.run("sweep", 100)
    await broker.records.delete_garbage()
    assert [key async for key in broker.store.redis.scan_iter("*record:g*")] == []
    settings.config_set("maxmemory", 0)
    assert await broker.submit_rollouts("generation-h-0-1", late) == [], "the lease was kept meanwhile"
    assert (await broker.status()).ledger.balanced
    await broker.close()


async def test_back_pressure_comes_before_redis_is_full_and_its_reason_is_shown(
    new_broker: Callable[..., Broker], broker_rig: Any
) -> None:
    broker = new_broker()
    await broker.publish_policy(broker_rig.manifest(0))
    held = (await broker.lease_tasks("generation-h-0-1", 1, 0)).tasks
    broker.memory.pressure = Pressure(80 << 20, 100 << 20)
    more = (await broker.lease_tasks("generation-h-0-1", 100, 0)).tasks
    assert len(more) == 3, "the rest of the group that is admitted, and no other group"
    assert await broker.submit_rollouts("generation-h-0-1", [broker_rig.sampled(held[0])]) == []
    assert (
        "Redis uses 80 of its 100 MiB (maxmemory): no group is admitted until" in (await broker.status()).back_pressure
    )

    broker.memory.pressure = Pressure(95 << 20, 100 << 20)
    with pytest.raises(RedisFull, match="no group is admitted and no rollout is taken"):
        await broker.submit_rollouts("generation-h-0-1", [broker_rig.sampled(more[0])])
    assert "no rollout is taken" in (await broker.why_stalled())[0].reason
    broker.memory.pressure = Pressure(95 << 20, 0)
    assert (await broker.status()).back_pressure == ""


async def test_the_broker_looks_how_full_redis_is(own: ForgetfulRedis, settings: redis.Redis, broker_rig: Any) -> None:
    broker = Broker(broker_rig.config(), own.url, broker_rig.index)
    assert (await broker.store.pressure()).limit == 0
    settings.config_set("maxmemory", 100 << 20)
    memory = await broker.store.pressure()
    assert memory.limit == 100 << 20
    assert 0 < memory.used < memory.limit
    await broker.close()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("redis+sentinel://host:26379", "ends with /MASTER"),
        ("redis+sentinel://host:port/mymaster", "not HOST:PORT"),
        ("http://host", "URL"),
    ],
)
def test_an_address_of_no_use_is_one_sentence(url: str, sentence: str) -> None:
    with pytest.raises(Unusable, match=f"URL of Redis cannot be used: .*{sentence}"):
        open_client(url, 1.0)


def test_a_sentinel_address_names_the_sentinels_the_master_and_how_to_log_in() -> None:
    url = "rediss+sentinel://user:p%40ss@one:26379,two/mymaster/3?ssl_ca_certs=/ca.crt"
    pool: Any = open_client(url, 1.0).connection_pool
    assert pool.service_name == "mymaster"
    sentinels = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in sentinels] == [("one", 26379), ("two", 26379)]
    for options in (pool.connection_kwargs, *sentinels):
        assert (options["username"], options["password"], options["ssl_ca_certs"]) == ("user", "p@ss", "/ca.crt")
    assert pool.connection_kwargs["db"] == 3
    assert "SSL" in pool.connection_class.__name__
