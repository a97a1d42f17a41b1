"""A real fail-over by Sentinel in the middle of a run: the broker finds the new master, and the run goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.redis_process import LIMIT_S, RedisProcess, until
from tests.services.test_redis_forgets import BookKeeper, RealRun, check, work

from nouscoder.broker.core import Broker
from nouscoder.broker.errors import BrokerUnavailable
from nouscoder.broker.redis_server import find_redis_binary
from nouscoder.cli.status import status_text, why_stalled_text

AWAY = "Redis at .* (does not answer|cannot serve now)"


class FailOver:
    """A master, its replica, and one Sentinel that is enough to elect. It fails over `down_after_ms` after a death."""

    def __init__(self, folder: Path, down_after_ms: int = 500) -> None:
        binary = find_redis_binary()
        unsaved = ("--save", "")
        self.master = RedisProcess(binary, folder / "master", *unsaved)
        self.replica = RedisProcess(
            binary, folder / "replica", *unsaved, "--replicaof", "127.0.0.1", str(self.master.port)
        )
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor mymaster 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds mymaster {down_after_ms}\nsentinel failover-timeout mymaster 5000\n"
        )
        self.sentinel = RedisProcess(binary, folder / "sentinel", str(config), "--sentinel")
        self.url = f"redis+sentinel://127.0.0.1:{self.sentinel.port}/mymaster"
        until(lambda: self.sentinel.ask("SENTINEL", "REPLICAS", "mymaster"), "Sentinel knows the replica")
        self.until_replicated()

    def until_replicated(self) -> None:
        with self.master.client() as master:
            until(lambda: master.wait(1, 1000) == 1, "the replica has everything")

    def cut_off_the_replica(self) -> None:
        """What the master acknowledges from now on is lost with it."""
        os.kill(self.replica.process.pid, signal.SIGSTOP)
        self.master.ask("CLIENT", "KILL", "TYPE", "replica")

    def kill_the_master(self) -> None:
        self.master.kill()
        os.kill(self.replica.process.pid, signal.SIGCONT)

    def kill_the_master_when_the_replica_has_everything(self) -> None:
        """The master acknowledges no write between the last one that the replica gets and its death."""
        self.master.ask("CLIENT", "PAUSE", 60_000, "WRITE")
        offset = self.master.ask("INFO", "replication")["master_repl_offset"]
        until(lambda: self.replica.ask("INFO", "replication")["slave_repl_offset"] >= offset, "it has everything")
        self.kill_the_master()

    def close(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.kill()


@pytest.fixture
def redises(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FailOver]:
    made = FailOver(tmp_path / "redises", getattr(request, "param", 500))
    yield made
    made.close()


@pytest.mark.timeout(300)
@pytest.mark.heavy
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


@pytest.mark.soak
@pytest.mark.parametrize("redises", [20_000], indirect=True)
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_restore_determinism")
async def test_a_fail_over_in_the_middle_of_a_run_costs_nothing_and_status_names_it(
    tmp_path: Path, redises: FailOver, broker_rig: Any
) -> None:
    """Redis is away for 20 seconds, until Sentinel gives up the master; every acknowledged write is on the replica."""
    async with RealRun(tmp_path, redises, broker_rig) as real:

        async def disturb(run: asyncio.Future[None]) -> None:
            await real.until_committed(3, run)
            await asyncio.to_thread(redises.kill_the_master_when_the_replica_has_everything)
            await real.told(status_text, AWAY)
            await real.told(why_stalled_text, AWAY)
            assert not run.done()

        await real.learn(disturb)
        assert (await real.check()).lost == 0
    assert redises.replica.ask("ROLE")[0] == b"master"
