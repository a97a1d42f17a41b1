"""The learner's gRPC service, called over a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry
from tests.fake_learner_broker import FakeBroker

from nouscoder.config import Config, GenerationSection, LearnerSection, RunSection
from nouscoder.config.generation import VllmSection
from nouscoder.domain.policy import WeightTransfer
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.publication.policy_files import PolicyFiles
from nouscoder.learner.publication.sender import PolicySender
from nouscoder.learner.servicer import STATUS_CODES, LearnerServicer
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.worker import LearnerWorker
from nouscoder.policy_transfer.transfer import receive_shards
from nouscoder.rpc.channel import PeerNotFound, open_channel
from nouscoder.rpc.learner_client import LearnerClient
from nouscoder.rpc.server import Served, start_grpc
from nouscoder.v1 import learner_pb2, learner_pb2_grpc

NAME = "nouscoder.v1.LearnerService"
LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def _restore_determinism() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@dataclass
class Rig:
    """A learner with its service."""

    config: Config
    broker: FakeBroker
    worker: LearnerWorker
    client: LearnerClient
    stub: learner_pb2_grpc.LearnerServiceAsyncStub

    async def until(self, state: str) -> None:
        async def poll() -> None:
            while (await self.client.status()).state != state:
                await asyncio.sleep(0.01)

        await asyncio.wait_for(poll(), LIMIT_S)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    config = Config(
        run=RunSection(root=tmp_path, total_batches=2),
        learner=LearnerSection(steps_per_batch=2, learning_rate=1e-2, peak_flops=1e9),
        generation=GenerationSection(engine="vllm", vllm=VllmSection(weight_transfer=WeightTransfer.GLOO)),
    )
    write_policy_folder(config.run.folder / "policy", random_policy(0))
    broker = FakeBroker(lambda batch_id, version: random_batch(batch_id, seed=1, policy_version=version))
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        sender = PolicySender(config)
        worker = LearnerWorker(config, broker, LearnerMetrics(registry), LearnerCore(config), sender)
        stack.push_async_callback(worker.close)

        def register(server: grpc.aio.Server) -> None:
            learner_pb2_grpc.add_LearnerServiceServicer_to_server(
                LearnerServicer(worker, config.total_steps, PolicyFiles(RunFiles.of(config)), sender), server
            )

        served = Served(
            "127.0.0.1:0", "127.0.0.1:0", [NAME], register, registry, drain_s=0.1, status_codes=STATUS_CODES
        )
        address = await start_grpc(served, stack)
        client = await stack.enter_async_context(LearnerClient(address))
        channel = await stack.enter_async_context(open_channel(address))
        yield Rig(config, broker, worker, client, learner_pb2_grpc.LearnerServiceStub(channel))


async def test_status_pause_checkpoint_and_resume_over_the_wire(rig: Rig) -> None:
    before = await rig.client.status()
    assert (before.state, before.step, before.total_steps) == ("starting", 0, 4)
    with pytest.raises(grpc.aio.AioRpcError, match="still starting") as refused:
        await rig.stub.Checkpoint(learner_pb2.LearnerServiceCheckpointRequest())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    await rig.stub.Pause(learner_pb2.LearnerServicePauseRequest())
    run = asyncio.ensure_future(rig.worker.run())
    await rig.until("paused")
    saved = await rig.stub.Checkpoint(learner_pb2.LearnerServiceCheckpointRequest())
    assert saved.step == 0
    assert (Path(saved.path) / "manifest.json").is_file()
    assert rig.broker.commits == []

    await rig.stub.Resume(learner_pb2.LearnerServiceResumeRequest())
    await asyncio.wait_for(run, LIMIT_S)
    after = await rig.client.status()
    assert (after.state, after.step, after.policy_version) == ("finished", 4, 2)
    assert after.pass_rate > 0
    assert after.reward_mean == pytest.approx(2 * after.pass_rate - 1)
    assert after.staleness_max == 1
    assert after.tokens_per_second > 0
    assert rig.broker.commits == [(0, 2), (1, 4)]


async def test_the_newest_policy_is_sent_from_memory_as_it_is_in_its_files(rig: Rig) -> None:
    await asyncio.wait_for(rig.worker.run(), LIMIT_S)
    newest = rig.broker.policies[-1]
    assert newest.policy_version == 2
    rendezvous = await rig.client.send_policy(2, newest.digest, 1)
    received = await asyncio.to_thread(receive_shards, newest.shards, rendezvous, 1, LIMIT_S)
    files = [(Path(newest.folder) / shard.name).read_bytes() for shard in newest.shards]
    assert [data.numpy().tobytes() for data in received] == files
    with pytest.raises(PeerNotFound, match="policy version 1 is not in the learner's memory: take its files"):
        await rig.client.send_policy(1, rig.broker.policies[1].digest, 1)
