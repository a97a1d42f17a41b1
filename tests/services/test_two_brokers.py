"""Two brokers serve one run on one Redis. One of them is killed every 10 s, and the run goes on."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from tests.services.test_broker_restart import free_address, start_broker_process

from nouscoder.config import Config
from nouscoder.data.problems import save_problems
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.learner.worker import LearnerWorker
from nouscoder.rpc.broker_client import BrokerClient

PATIENCE_S = 60.0
KILL_EVERY_S = 10.0
# What a worker's sampling or grading takes: it bounds what the test itself costs.
WORK_S = 0.1


class Brokers:
    """Two broker processes with addresses of their own. `address` is both, as one service has them."""

    def __init__(self, folder: Path, configs: list[Config]) -> None:
        self._folder = folder
        self._configs = configs
        self._processes: list[asyncio.subprocess.Process] = []

    def address(self, first: int) -> str:
        """Both addresses; a client uses the other one when `first` is away."""
        both = [self._configs[first].broker.grpc, self._configs[1 - first].broker.grpc]
        return "ipv4:" + ",".join(both)

    async def __aenter__(self) -> Brokers:
        for place in range(2):
            self._processes.append(await self._started(place))
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def replace(self, place: int) -> None:
        """Kill one, and start it again."""
        self._processes[place].kill()
        await self._processes[place].wait()
        self._processes[place] = await self._started(place)

    async def _started(self, place: int) -> asyncio.subprocess.Process:
        config, folder = self._configs[place], self._folder / f"broker-{place}"
        folder.mkdir(exist_ok=True)
        process = await start_broker_process(folder, config)
        async with BrokerClient(config.broker.grpc, "status", PATIENCE_S) as client:
            await client.status()
        return process


async def sample(client: BrokerClient, rig: Any) -> None:
    while True:
        tasks = (await client.lease_tasks(8, 5.0)).tasks
        await asyncio.sleep(WORK_S)
        version = max((item.task.min_policy_version for item in tasks), default=0)
        await client.submit_rollouts([(item.lease.lease_id, rig.rollout(item.task, version)) for item in tasks])


async def grade(client: BrokerClient, rig: Any) -> None:
    while True:
        gradings = (await client.lease_grading(8, 5.0)).gradings
        await asyncio.sleep(WORK_S)
        verdicts = [
            (item.lease.lease_id, item.rollout_id, rig.verdict(rig.mixed(item.rollout_id))) for item in gradings
        ]
        await client.submit_verdicts(verdicts)


async def longest_gap_s(core: LearnerCore) -> float:
    """Seconds of the longest time without a step, from now until cancelled."""
    longest_s, step, since_s = 0.0, core.progress.step, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.05)
            longest_s = max(longest_s, time.monotonic() - since_s)
            if core.progress.step != step:
                step, since_s = core.progress.step, time.monotonic()
    except asyncio.CancelledError:
        return longest_s


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_a_run_goes_on_while_one_of_two_brokers_is_killed_every_ten_seconds(
    tmp_path: Path, broker_rig: Any
) -> None:
    """For five minutes, no step takes longer than two leases."""
    save_problems(tmp_path / "train.jsonl", broker_rig.problems)
    settings = [f"broker.redis_url={broker_rig.url}", f"problems.train={tmp_path / 'train.jsonl'}", "run.name=two"]
    settings += [f"run.root={tmp_path}", "run.total_batches=100000", "learner.steps_per_batch=1"]
    settings += ["learner.peak_flops=1e9", "learner.keep_batches=100000", "broker.pipeline_k=3"]
    configs = [broker_rig.config(*settings, f"broker.grpc={free_address()}") for _ in range(2)]
    config = configs[0]
    write_policy_folder(config.run.folder / "policy", random_policy(0))
    threads = torch.get_num_threads()
    async with AsyncExitStack() as stack:
        brokers = await stack.enter_async_context(Brokers(tmp_path, configs))

        async def client(worker_id: str, first: int) -> BrokerClient:
            return await stack.enter_async_context(BrokerClient(brokers.address(first), worker_id, PATIENCE_S))

        work = [asyncio.ensure_future(sample(await client(f"generation-h-{n}-1", n), broker_rig)) for n in range(2)]
        work += [asyncio.ensure_future(grade(await client(f"verifier-h-{n}-1", n), broker_rig)) for n in range(2)]
        core, learner = LearnerCore(config), await client("learner-h-0-1", 0)
        worker = LearnerWorker(config, learner, LearnerMetrics(CollectorRegistry()), core)
        work.append(asyncio.ensure_future(worker.run()))
        try:
            async with asyncio.timeout(120):
                while core.progress.step < 3:
                    assert not any(task.done() for task in work)
                    await asyncio.sleep(0.05)
            gap = asyncio.ensure_future(longest_gap_s(core))
            begun_s, num_kills = time.monotonic(), 0
            while time.monotonic() < begun_s + 300:
                next_s = time.monotonic() + KILL_EVERY_S
                await brokers.replace(num_kills % 2)
                num_kills += 1
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                assert not any(task.done() for task in work)
            gap.cancel()
            longest_s = await gap
            status = await learner.status()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await worker.close()
            torch.use_deterministic_algorithms(False)
            torch.set_num_threads(threads)
    saved = SavedBatches(config.run.folder / "batches", 100_000)
    groups = [group for number in saved.numbers() for group in saved.load(number).groups()]
    print(f"{num_kills} kills, {core.progress.step} steps, {status.ledger}, longest gap {longest_s:.1f} s")
    assert longest_s <= 2 * config.broker.lease_s
    assert len(groups) == len(set(groups)) >= 2 * status.batches_committed
    assert (status.ledger.balanced, status.ledger.lost, status.ledger.abandoned) == (True, 0, 0)
