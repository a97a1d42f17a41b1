"""A real fail-over by Sentinel in the middle of a run: the broker finds the new master, and the run goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.services.test_redis_forgets import BookKeeper, check, work

from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerUnavailable
from nouscoder.broker.redis_server import find_redis_binary

LIMIT_S = 120.0


class FailOver:
    """A master, its replica, and one Sentinel that is enough to elect."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {name: _free_port() for name in ("master", "replica", "sentinel")}
        self.url = f"redis+sentinel://127.0.0.1:{self._ports['sentinel']}/mymaster"
        self._start("master")
        self._start("replica", "--replicaof", "127.0.0.1", str(self._ports["master"]))
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {self._ports['sentinel']}\ndir {folder}\n"
            f"sentinel monitor mymaster 127.0.0.1 {self._ports['master']} 1\n"
            "sentinel down-after-milliseconds mymaster 500\nsentinel failover-timeout mymaster 5000\n"
        )
        self._run("sentinel", [find_redis_binary(), str(config), "--sentinel"])
        with self.client("sentinel") as sentinel:
            _until(lambda: sentinel.execute_command("SENTINEL", "REPLICAS", "mymaster"), "Sentinel knows the replica")
        self.until_replicated()

    def _start(self, name: str, *options: str) -> None:
        folder = self._folder / name
        folder.mkdir()
        command = [find_redis_binary(), "--port", str(self._ports[name]), "--dir", str(folder), "--save", ""]
        self._run(name, [*command, *options])

    def _run(self, name: str, command: list[str]) -> None:
        self._processes[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with self.client(name) as client:
            _until(lambda: _answers(client), f"{name} answers")

    def client(self, name: str) -> redis.Redis:
        return redis.Redis(port=self._ports[name])

    def until_replicated(self) -> None:
        with self.client("master") as master:
            _until(lambda: master.wait(1, 1000) == 1, "the replica has everything")

    def cut_off_the_replica(self) -> None:
        """What the master acknowledges from now on is lost with it."""
        os.kill(self._processes["replica"].pid, signal.SIGSTOP)
        with self.client("master") as master:
            kill: Any = master.execute_command
            kill("CLIENT", "KILL", "TYPE", "replica")

    def kill_the_master(self) -> None:
        self._processes["master"].kill()
        os.kill(self._processes["replica"].pid, signal.SIGCONT)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def _until(condition: Any, what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture
def redises(tmp_path: Path) -> Iterator[FailOver]:
    made = FailOver(tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(300)
async def test_a_run_goes_on_on_the_new_master_which_lacks_the_last_writes(redises: FailOver, broker_rig: Any) -> None:
    broker = Broker(broker_rig.config(), redises.url, broker_rig.index)
    learner = BookKeeper(broker, broker_rig)
    await learner.begin()
    await work(learner, broker_rig)
    assert await learner.train()
    await asyncio.to_thread(redises.until_replicated)
    redises.cut_off_the_replica()
    await work(learner, broker_rig)
    assert await learner.train()
    redises.kill_the_master()

    with pytest.raises(BrokerUnavailable):
        await broker.status()
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await learner.train()
                break
            except BrokerUnavailable:
                await asyncio.sleep(0.1)
    assert learner.num_restored == 1
    check(learner, await broker.status())
    while learner.books.batches < 4:
        await work(learner, broker_rig)
        await learner.train()
    check(learner, await broker.status())
    await broker.close()
