"""The learner's loop with a broker in memory. A restart at any point gives the same history."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from tests.fake_learner_broker import FakeBroker, recorded

from nouscoder.atomic_files import FolderInUse, StorageError, numbered
from nouscoder.config import Config, LearnerSection, RunSection
from nouscoder.domain.batch import Batch
from nouscoder.domain.lease import LeasedBatch
from nouscoder.domain.policy import PolicyManifest
from nouscoder.errors import Unusable
from nouscoder.learner.core import LearnerCore, LearnerError
from nouscoder.learner.loading import prepare_thread, trainer_at
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.metrics.step import TrainedBatch
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.publication.publisher import StagedPolicy
from nouscoder.learner.state.batch_settings import BatchSettings
from nouscoder.learner.state.checkpoint_store import Checkpoint, CheckpointStore, PendingCheckpoint
from nouscoder.learner.state.run_files import RunFiles
from nouscoder.learner.state.run_log import BatchSeconds
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.learner.worker import LearnerState, LearnerWorker

EVALUATION_BEFORE = "evaluation_before.json"
NUM_BATCHES, STEPS_PER_BATCH = 3, 2
LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def _restore_determinism() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def make_batch(batch_id: int, policy_version: int) -> Batch:
    return random_batch(batch_id, seed=1, policy_version=policy_version)


def make_config(root: Path, **learner: Any) -> Config:
    section = {"steps_per_batch": STEPS_PER_BATCH, "learning_rate": 1e-2, "peak_flops": 1e9, **learner}
    return Config(
        run=RunSection(root=root, seed=5, total_batches=NUM_BATCHES), learner=LearnerSection.model_validate(section)
    )


@dataclass
class Run:
    """A run folder with its broker. Each `start` acts like a new process."""

    config: Config
    broker: FakeBroker

    @classmethod
    def create(cls, root: Path, **learner: Any) -> Run:
        config = make_config(root, **learner)
        write_policy_folder(config.run.folder / "policy", random_policy(0))
        return cls(config, FakeBroker(make_batch))

    def worker(self) -> LearnerWorker:
        self.core = LearnerCore(self.config)
        self.registry = CollectorRegistry()
        return LearnerWorker(self.config, self.broker, LearnerMetrics(self.registry), self.core)

    async def start(self, worker: LearnerWorker | None = None) -> LearnerWorker:
        worker = worker or self.worker()
        try:
            await asyncio.wait_for(worker.run(), LIMIT_S)
        finally:
            await worker.close()
        return worker

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.config.run.folder / name).read_text().splitlines()]

    def history(self) -> tuple[Any, ...]:
        """All results that must not depend on the point of the kill."""
        figures = [(line["step"], line["batch_id"], line["loss"], line["gradient_norm"]) for line in self.lines()]
        samples = [(line["step"], line["rollout_id"], line["program"]) for line in self.lines("samples.jsonl")]
        policies = [(manifest.policy_version, manifest.step, manifest.digest) for manifest in self.broker.policies]
        return figures, samples, policies, self.broker.commits, self.broker.finished


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without a kill."""
    run = Run.create(tmp_path_factory.mktemp("undisturbed"), keep_checkpoints=10)
    asyncio.run(run.start())
    return run


def waiting(run: Run, **learner: Any) -> Run:
    """The same run with a learner that waits for the first evaluation."""
    update = {"start_after": EVALUATION_BEFORE, **learner}
    run.config = run.config.model_copy(update={"learner": run.config.learner.model_copy(update=update)})
    return run


async def until_state(worker: LearnerWorker, state: LearnerState) -> None:
    async with asyncio.timeout(LIMIT_S):
        while worker.status().state is not state:
            await asyncio.sleep(0.005)


async def test_nothing_is_published_before_the_awaited_evaluation_file_exists(tmp_path: Path, undisturbed: Run) -> None:
    run = waiting(Run.create(tmp_path))
    worker = run.worker()
    running = asyncio.ensure_future(run.start(worker))
    await until_state(worker, LearnerState.WAITING_FOR_EVALUATION)
    await asyncio.sleep(0.1)
    assert run.broker.policies == []
    assert run.registry.get_sample_value("nouscoder_learner_wait_seconds_total", {"for": "evaluation"}) is not None
    (run.config.run.folder / EVALUATION_BEFORE).write_text("{}")
    await running
    assert run.history() == undisturbed.history()


async def test_a_missing_first_evaluation_ends_the_wait(tmp_path: Path) -> None:
    run = waiting(Run.create(tmp_path), batch_patience_s=0.1)
    with pytest.raises(
        LearnerError, match=r"evaluation_before.json did not appear within \d+ s: does `nouscoder train` run"
    ):
        await run.start()


async def test_a_learner_waits_for_the_one_that_it_replaces(tmp_path: Path) -> None:
    run = waiting(Run.create(tmp_path), folder_patience_s=60.0)
    former = LearnerCore(run.config)
    former.start()
    worker = run.worker()
    running = asyncio.ensure_future(run.start(worker))
    await asyncio.sleep(0.2)
    assert worker.status().state is LearnerState.STARTING
    former.close()
    await until_state(worker, LearnerState.WAITING_FOR_EVALUATION)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_run_trains_every_batch_once_and_finishes(undisturbed: Run) -> None:
    figures, samples, policies, commits, finished = undisturbed.history()
    assert [figure[:2] for figure in figures] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert commits == [(0, 2), (1, 4), (2, 6)]
    assert [(version, step) for version, step, _ in policies] == [(0, 0), (1, 2), (2, 4), (3, 6)]
    assert len({digest for _, _, digest in policies}) == 4
    assert len(samples) == 3 * undisturbed.config.learner.samples_per_batch
    assert finished


async def test_a_finished_run_started_again_does_nothing(undisturbed: Run, tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    await run.start()
    await run.start()
    assert run.history() == undisturbed.history()


def trained_again(config: Config, step: int, batch_id: int) -> TrainedBatch:
    """A saved batch, trained in memory from the checkpoint of `step`, 0: the first policy."""
    files = RunFiles.of(config)
    prepare_thread(config.learner.threads)
    trainer = trainer_at(config, CheckpointStore(files.checkpoints, 1).at_step(step) if step else None)
    trainer.use(BatchSettings(files.batches).kept(batch_id, config.learner) or config.learner)
    return trainer.train_batch(SavedBatches(files.batches, 1).load(batch_id))


async def test_a_committed_batch_with_a_damaged_checkpoint_is_trained_again_from_the_saved_batch(
    undisturbed: Run, tmp_path: Path
) -> None:
    run = Run.create(tmp_path, keep_checkpoints=3)
    await run.start()
    run.broker.finished = False
    for number, path in numbered(RunFiles.of(run.config).checkpoints).items():
        if number > 2:
            (path / ".metadata").write_bytes(b"torn")
    await run.start()
    assert run.history() == undisturbed.history()
    assert [step for step, *_ in run.history()[0]] == [1, 2, 3, 4, 5, 6]


async def test_lost_checkpoints_and_batches_are_one_sentence(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    await run.start()
    run.broker.finished = False
    shutil.rmtree(RunFiles.of(run.config).checkpoints)
    shutil.rmtree(RunFiles.of(run.config).batches)
    with pytest.raises(Exception, match=r"batches/00000000\.batch cannot be read"):
        await run.start()


async def test_replaying_a_saved_batch_from_a_checkpoint_gives_the_losses_of_the_run(
    undisturbed: Run, tmp_path: Path
) -> None:
    run = Run.create(tmp_path, keep_checkpoints=10)
    core = LearnerCore(run.config)
    core.start()
    for batch_id in range(NUM_BATCHES):
        leased, records = recorded(make_batch(batch_id, batch_id))

        async def pieces(records: dict[str, bytes] = records) -> AsyncIterator[bytes]:
            for record in records.values():
                yield record

        await core.save_batch(leased, pieces())
        core.train(make_batch(batch_id, batch_id))
        core.finish_checkpoint(core.begin_checkpoint())
    core.close()
    for batch_id, step in ((0, 0), (1, 2), (2, 4)):
        replayed = trained_again(run.config, step, batch_id)
        losses = [line["loss"] for line in undisturbed.lines() if line["batch_id"] == batch_id]
        assert [taken.loss for taken in replayed.steps] == losses


async def test_a_batch_trained_again_keeps_its_settings_when_the_run_is_resumed_with_others(
    undisturbed: Run, tmp_path: Path
) -> None:
    """The learning rate changes on resume. Batches committed before still give the published weights."""
    run = Run.create(tmp_path)
    await run.start()
    run.broker.finished = False
    shutil.rmtree(RunFiles.of(run.config).checkpoints)
    changed = run.config.learner.model_copy(update={"learning_rate": 1e-4})
    run.config = run.config.model_copy(update={"learner": changed})
    await run.start()
    assert run.history() == undisturbed.history()


async def test_recent_batches_are_replayed_and_a_resumed_run_replays_the_same_ones(tmp_path: Path) -> None:
    """The files that a replay needs outlive every checkpoint, and replayed rollouts are in no book."""
    many = {"replay_batches": 1, "keep_batches": 1, "keep_checkpoints": 1, "checkpoint_every_batches": 1}
    run = Run.create(tmp_path / "run", **many)
    await run.start()
    num_rollouts = len(make_batch(0, 0).rollouts)
    assert [line["replayed_rollouts"] for line in run.lines()] == [0, 0, *[num_rollouts] * 4]
    assert run.core.progress.rollouts == NUM_BATCHES * num_rollouts

    other = Run.create(tmp_path / "other", **{**many, "keep_batches": 3, "keep_checkpoints": 3})
    await other.start()
    other.broker.finished = False
    shutil.rmtree(RunFiles.of(other.config).checkpoints)
    without = other.config.learner.model_copy(update={"replay_batches": 0})
    other.config = other.config.model_copy(update={"learner": without})
    await other.start()
    assert other.history() == run.history(), "every batch was trained again as the first time"


async def test_a_failed_checkpoint_is_counted_logged_and_retried(
    undisturbed: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.create(tmp_path, checkpoint_every_batches=1)
    worker = run.worker()
    begin, calls = run.core.begin_checkpoint, 0

    def fails_once() -> PendingCheckpoint:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise StorageError("the disk is full")
        return begin()

    run.core.begin_checkpoint = fails_once  # type: ignore[method-assign]
    await run.start(worker)
    assert run.history() == undisturbed.history()
    failed, written = (
        run.registry.get_sample_value("nouscoder_learner_checkpoints_total", {"outcome": outcome})
        for outcome in ("failed", "written")
    )
    assert failed == 1
    assert written is not None
    assert written >= 1
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "a checkpoint failed"
    ]
    assert max(numbered(RunFiles.of(run.config).checkpoints)) == NUM_BATCHES * STEPS_PER_BATCH


async def test_too_many_failed_checkpoints_end_the_run_with_the_reason(tmp_path: Path) -> None:
    run = Run.create(tmp_path, checkpoint_every_batches=1)
    run.config = run.config.model_copy(update={"run": run.config.run.model_copy(update={"total_batches": 50})})
    worker = run.worker()

    def fails() -> PendingCheckpoint:
        raise StorageError("the disk is full")

    run.core.begin_checkpoint = fails  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="the disk is full"):
        await run.start(worker)
    assert len(run.broker.commits) < 10


async def test_a_failed_publication_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    worker = run.worker()
    write = run.core.write_policy

    def fails(policy: StagedPolicy) -> PolicyManifest:
        if policy.policy_version == 1:
            raise StorageError("the disk is full: policies/00000001 was not written")
        return write(policy)

    run.core.write_policy = fails  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="00000001 was not written"):
        await run.start(worker)


async def test_training_continues_while_a_policy_is_published_and_a_checkpoint_written(
    undisturbed: Run, tmp_path: Path
) -> None:
    """Batch 1 is trained before version 1 is published and before the checkpoint of batch 0 is written."""
    run = Run.create(tmp_path, checkpoint_every_batches=1)
    worker = run.worker()
    trained = threading.Event()
    write, finish, train = run.core.write_policy, run.core.finish_checkpoint, run.core.train

    def write_late(policy: StagedPolicy) -> PolicyManifest:
        assert policy.policy_version != 1 or trained.wait(LIMIT_S)
        return write(policy)

    def finish_late(pending: PendingCheckpoint) -> Checkpoint:
        assert trained.wait(LIMIT_S)
        return finish(pending)

    def train_and_tell(batch: Batch, seconds: BatchSeconds | None = None) -> TrainedBatch:
        answer = train(batch, seconds)
        if batch.batch_id == 1:
            trained.set()
        return answer

    run.core.write_policy = write_late  # type: ignore[method-assign]
    run.core.finish_checkpoint = finish_late  # type: ignore[method-assign]
    run.core.train = train_and_tell  # type: ignore[method-assign]
    await run.start(worker)
    assert run.history() == undisturbed.history()


async def test_stopping_between_batches_leaves_a_checkpoint_of_the_last_one(undisturbed: Run, tmp_path: Path) -> None:
    run = Run.create(tmp_path, checkpoint_every_batches=100)
    worker = run.worker()
    task = asyncio.ensure_future(worker.run())
    await until(lambda: len(run.broker.commits) >= 1)
    worker.pause()
    await until(lambda: worker.status().state in (LearnerState.PAUSED, LearnerState.FINISHED))
    step = worker.status().step
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await worker.stop()
    assert max(numbered(RunFiles.of(run.config).checkpoints)) == step
    await run.start()
    assert run.history() == undisturbed.history()


async def test_a_broker_of_another_run_is_refused(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    run.broker = FakeBroker(lambda batch_id, version: random_batch(batch_id + 7, seed=1, policy_version=version))
    with pytest.raises(LearnerError, match="batch 7 was leased, but batch 0 is next"):
        await run.start()


async def test_a_broker_ahead_of_every_checkpoint_is_refused(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    await run.start()
    run.broker.finished = False
    shutil.rmtree(RunFiles.of(run.config).checkpoints)
    shutil.rmtree(RunFiles.of(run.config).batches)
    run.broker.commits.clear()
    with pytest.raises(Unusable, match="checkpoints of this run are missing"):
        await run.start()


async def test_a_run_has_one_learner(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    first = run.worker()
    await first._in_thread(run.core.start)
    try:
        with pytest.raises(FolderInUse, match="another learner is working"):
            await run.start()
    finally:
        await first.close()
    await run.start()


async def test_a_policy_folder_without_a_policy_is_one_sentence(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    shutil.rmtree(run.config.run.folder / "policy")
    with pytest.raises(Unusable, match="policy"):
        await run.start()


async def test_more_steps_than_groups_in_a_batch_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"learner\.steps_per_batch is 9, but a batch has 8 groups"):
        Run.create(tmp_path, steps_per_batch=9).worker()


async def test_a_batch_that_cannot_be_trained_on_is_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    run.broker = FakeBroker(lambda batch_id, version: random_batch(batch_id, seed=1, num_groups=1))
    with pytest.raises(LearnerError, match="batch 0 cannot be trained on: batch 0 has 1 groups"):
        await run.start()
    ((batch_id, reason),) = run.broker.failures
    assert batch_id == 0
    assert "batch 0 has 1 groups" in reason, "the broker holds a batch back that fails again and again"


async def test_no_batch_within_the_time_limit_is_one_sentence(tmp_path: Path) -> None:
    run = Run.create(tmp_path, batch_patience_s=0.05)

    async def nothing(wait_s: float = 10.0, run_id: str = "", batches: int = 0) -> LeasedBatch:
        await asyncio.sleep(0.01)
        return LeasedBatch()

    run.broker.lease_batch = nothing  # type: ignore[method-assign]
    with pytest.raises(LearnerError, match="why-stalled"):
        await run.start()


async def test_pause_leases_no_batch_and_resume_continues(undisturbed: Run, tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    worker = run.worker()
    worker.pause()
    task = asyncio.ensure_future(run.start(worker))
    await until(lambda: worker.status().state is LearnerState.PAUSED)
    assert run.broker.commits == []
    path, step = await worker.checkpoint()
    assert (path.name, step) == ("00000000", 0)
    worker.resume()
    await asyncio.wait_for(task, LIMIT_S)
    assert worker.status().state is LearnerState.FINISHED
    assert run.history() == undisturbed.history()


async def test_checkpoints_requested_at_any_time_hold_whole_batches(undisturbed: Run, tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    worker = run.worker()
    task = asyncio.ensure_future(run.start(worker))
    await until(lambda: worker.status().state is not LearnerState.STARTING)
    steps = []
    while not task.done():
        try:
            steps.append((await worker.checkpoint())[1])
        except LearnerError:  # the run ended during the call
            break
        await asyncio.sleep(0.005)
    await task
    assert steps
    assert all(step % STEPS_PER_BATCH == 0 for step in steps)
    assert run.history() == undisturbed.history()


async def test_closing_during_a_batch_stops_before_the_next_step(undisturbed: Run, tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    worker = run.worker()
    task = asyncio.ensure_future(worker.run())
    await until(lambda: worker.status().state is LearnerState.TRAINING)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await worker.close()
    await run.start()
    assert run.history() == undisturbed.history()


def test_every_learner_metric_of_the_design_is_exported(undisturbed: Run) -> None:
    page = generate_latest(undisturbed.registry).decode()
    for sample in (
        "nouscoder_learner_steps_total 6.0",
        "nouscoder_learner_rollout_staleness_versions_count 48.0",
        "nouscoder_learner_reward_mean ",
        "nouscoder_learner_pass_rate ",
        "nouscoder_learner_entropy ",
        'nouscoder_learner_importance_ratio{stat="mean"} ',
        'nouscoder_learner_importance_ratio{stat="max"} ',
        'nouscoder_learner_importance_ratio{stat="min"} ',
        "nouscoder_learner_effective_sample_size ",
        'nouscoder_learner_clip_fraction{side="low"} ',
        'nouscoder_learner_clip_fraction{side="high"} ',
        "nouscoder_learner_gradient_norm ",
        "nouscoder_learner_tokens_per_second ",
        "nouscoder_learner_mfu ",
        'nouscoder_learner_wait_seconds_total{for="batch"} ',
        'nouscoder_learner_wait_seconds_total{for="checkpoint"} ',
        'nouscoder_learner_wait_seconds_total{for="publish"} ',
        'nouscoder_learner_response_length_tokens{correct="true"} ',
        'nouscoder_learner_response_length_tokens{correct="false"} ',
    ):
        assert f"\n{sample}" in page, sample


async def until(condition: Any) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), LIMIT_S)
