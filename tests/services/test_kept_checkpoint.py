"""Checkpoints that evaluations ask the learner to keep: of which version, and what happens when none is possible."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry
from tests.fake_learner_broker import FakeBroker

from nouscoder.atomic_files import StorageError, numbered
from nouscoder.config import Config, EvaluationSection, LearnerSection, RunSection
from nouscoder.learner.core import LearnerCore, LearnerError
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.publication.policy_files import PolicyFiles
from nouscoder.learner.publication.sender import PolicySender
from nouscoder.learner.servicer import STATUS_CODES, LearnerServicer
from nouscoder.learner.state import checkpoint_schedule
from nouscoder.learner.state.checkpoint_store import PendingCheckpoint, verified_checkpoint
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.worker import LearnerWorker
from nouscoder.rpc.server import Served, start_grpc
from nouscoder.run.kept_checkpoint import NotKept, kept_checkpoint
from nouscoder.v1 import learner_pb2_grpc

LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def _restore_determinism() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@dataclass
class Learner:
    """A learner of four batches that keeps one checkpoint, its core, and a configuration with its address."""

    config: Config
    core: LearnerCore
    worker: LearnerWorker

    @property
    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.config.run.folder / "kept").glob("*"))

    async def run(self) -> None:
        await asyncio.wait_for(self.worker.run(), LIMIT_S)


@pytest.fixture
async def learner(tmp_path: Path) -> AsyncIterator[Learner]:
    section: dict[str, Any] = {"steps_per_batch": 2, "peak_flops": 1e9, "keep_checkpoints": 1}
    config = Config(
        run=RunSection(root=tmp_path, total_batches=4),
        evaluation=EvaluationSection(limit_s=LIMIT_S),
        learner=LearnerSection.model_validate({**section, "checkpoint_every_batches": 1}),
    )
    write_policy_folder(config.run.folder / "policy", random_policy(0))
    broker = FakeBroker(lambda batch_id, version: random_batch(batch_id, seed=1, policy_version=version))
    registry = CollectorRegistry()
    core = LearnerCore(config)
    async with AsyncExitStack() as stack:
        worker = LearnerWorker(config, broker, LearnerMetrics(registry), core)
        stack.push_async_callback(worker.close)
        servicer = LearnerServicer(worker, config.total_steps, PolicyFiles(RunFiles.of(config)), PolicySender(config))

        def register(server: grpc.aio.Server) -> None:
            learner_pb2_grpc.add_LearnerServiceServicer_to_server(servicer, server)

        name = "nouscoder.v1.LearnerService"
        served = Served(
            "127.0.0.1:0", "127.0.0.1:0", [name], register, registry, drain_s=0.1, status_codes=STATUS_CODES
        )
        address = await start_grpc(served, stack)
        config = config.model_copy(update={"learner": config.learner.model_copy(update={"grpc": address})})
        yield Learner(config, core, worker)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint can be kept."""

    def full(*_: Any) -> Path:
        raise StorageError("the disk is full: it was not written")

    monkeypatch.setattr(checkpoint_schedule, "keep_checkpoint", full)


async def test_the_version_that_is_asked_for_is_kept_when_its_checkpoint_is_pruned(learner: Learner) -> None:
    running = asyncio.ensure_future(learner.run())
    async with kept_checkpoint(learner.config, 2) as version:
        assert version >= 2  # 2, unless an earlier checkpoint was still being written
    await running
    folder = learner.config.run.folder
    assert learner.kept == [f"{version:08d}.checkpoint"]
    assert verified_checkpoint(folder / "kept" / learner.kept[0]).progress.policy_version == version
    assert [*numbered(folder / "checkpoints")] == [8]


@pytest.mark.parametrize("version", [3, 4])  # of 4 in the run: the last one's checkpoint is that of the run's end
async def test_a_checkpoint_that_is_being_written_delays_the_one_that_is_kept(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    finish, trained = PendingCheckpoint.finish, threading.Event()

    def slow(pending: PendingCheckpoint) -> Any:
        assert pending.progress.policy_version != 1 or trained.wait(LIMIT_S)
        return finish(pending)

    monkeypatch.setattr(PendingCheckpoint, "finish", slow)
    real = learner.core.train

    def train_and_tell(batch: Any, *arguments: Any) -> Any:
        answer = real(batch, *arguments)
        if learner.core.progress.policy_version == version:
            trained.set()
        return answer

    monkeypatch.setattr(learner.core, "train", train_and_tell)
    asked = asyncio.ensure_future(learner.worker.checkpoints.keep(2))
    await learner.run()
    kept = await asked
    assert version <= kept.policy_version <= 4
    assert verified_checkpoint(await kept.path()).progress.policy_version == kept.policy_version


async def test_a_run_that_ends_before_is_said(learner: Learner) -> None:
    waiting = asyncio.ensure_future(learner.worker.checkpoints.keep(5))
    await learner.run()
    with pytest.raises(LearnerError, match="the learner ended before a checkpoint of version 5 was possible"):
        await waiting
    with pytest.raises(NotKept, match="the learner ended before a checkpoint of version 1 was possible"):
        async with kept_checkpoint(learner.config, 1):
            pass
    assert learner.kept == []


@pytest.mark.usefixtures("full_disk")
async def test_a_checkpoint_that_could_not_be_kept_is_said_and_training_goes_on(learner: Learner) -> None:
    running = asyncio.ensure_future(learner.run())
    with pytest.raises(NotKept, match=r"the checkpoint of version \d was not kept: .*the disk is full"):
        async with kept_checkpoint(learner.config, 2):
            pass
    await running
    assert learner.core.progress.policy_version == 4
    assert learner.kept == []


@pytest.mark.usefixtures("full_disk")
async def test_a_last_checkpoint_that_could_not_be_kept_ends_the_run_well(learner: Learner) -> None:
    running = asyncio.ensure_future(learner.run())
    with pytest.raises(NotKept, match=r"the checkpoint of version 4 was not kept: .*the disk is full"):
        async with kept_checkpoint(learner.config, 4):
            pass
    await running
    assert [*numbered(learner.config.run.folder / "checkpoints")] == [8]


async def test_a_caller_that_goes_away_leaves_nothing(learner: Learner) -> None:
    waiting = asyncio.ensure_future(learner.worker.checkpoints.keep(2))
    await asyncio.sleep(0)
    waiting.cancel()
    await learner.run()
    assert learner.kept == []


async def test_a_learner_that_is_away_is_said(learner: Learner) -> None:
    config = learner.config
    away = config.model_copy(update={"learner": config.learner.model_copy(update={"grpc": "127.0.0.1:9"})})
    with pytest.raises(NotKept, match=r"learner at 127.0.0.1:9: UNAVAILABLE"):
        async with kept_checkpoint(away, 1):
            pass
