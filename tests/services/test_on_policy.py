"""Strictly on-policy training: with k = 1 and one step per batch, the services train like a synchronous loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from nouscoder.broker.core import Broker
from nouscoder.broker.curriculum import Curriculum, open_curriculum
from nouscoder.broker.process import serve_broker
from nouscoder.broker.rewards import Rewards
from nouscoder.config import Config, load_config
from nouscoder.data.problem_index import ProblemIndex, build_index
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.curriculum import task_seed
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Sampling, Task
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.generation.engines import open_engine
from nouscoder.generation.environments import open_environment
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.rollouts import Rollouts
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.worker import RolloutWorker
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.loading import prepare_thread
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.learner.model.weights import load_model
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.trainer import Trainer
from nouscoder.learner.worker import LearnerWorker
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.store.blobs import FolderBlobs
from nouscoder.store.rollout_record import encode_rollout
from nouscoder.store.tests import TestStore

NUM_BATCHES, GROUP_SIZE, BATCH_SIZE = 12, 4, 8
LIMIT_S = 240.0
PROBLEMS = tuple(
    Problem(f"p{i}", f"print {i} twice", StdinTests((StdinCase("1\n", f"{i}\n"),)), text_is_code=True) for i in range(6)
)


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def config_of(root: Path) -> Config:
    """The configuration. One rollout is decoded at a time, so that the order of arrival does not affect rounding."""
    overrides = {
        "run.root": f'"{root}"', "run.name": "on-policy", "run.seed": 3, "run.total_batches": NUM_BATCHES,
        "broker.grpc": "127.0.0.1:0", "broker.group_size": GROUP_SIZE, "broker.batch_size": BATCH_SIZE,
        "broker.pipeline_k": 1, "broker.drop_zero_variance": "false",
        "generation.max_running": 1, "generation.max_tokens_total": 64, "generation.sampling.max_new_tokens": 12,
        "learner.steps_per_batch": 1, "learner.learning_rate": 1e-2, "learner.peak_flops": 1e9,
    }  # fmt: skip
    return load_config(None, [f"{key}={value}" for key, value in overrides.items()])


def verdict_of(text: str) -> Verdict:
    """The invented judge of both loops: a text of even length passes."""
    kind = VerdictKind.ACCEPTED if len(text) % 2 == 0 else VerdictKind.WRONG_ANSWER
    passed = int(kind is VerdictKind.ACCEPTED)
    return Verdict(kind=kind, passed=passed, total=1, graded=1, duration_s=0.01, backend="test")


async def synchronous_losses(config: Config, policy: Path, folder: Path) -> list[float]:
    """Sample a whole batch rollout by rollout, grade it, take one step, and repeat."""
    trainer, publisher = Trainer(load_model(policy), config), PolicyPublisher(folder, keep=2)
    environment = open_environment(config, policy)
    curriculum = open_curriculum(config, [problem.problem_id for problem in PROBLEMS])
    losses: list[float] = []
    async with open_engine(config, policy, GenerationMetrics()) as engine:
        for number in range(NUM_BATCHES):
            manifest = publisher.write(StagedPolicy.of(trainer.model, number, number))
            await engine.load_policy([Path(manifest.folder, shard.name) for shard in manifest.shards], number)
            graded: list[GradedRollout] = []
            for task in tasks_of(config, curriculum, number):
                rollout = await environment.rollout(task, engine)
                verdict = verdict_of(rollout.text)
                reward = Rewards(config).of(encode_rollout(rollout)[0], verdict)
                assert reward is not None
                graded.append(GradedRollout(rollout, verdict, reward))
            losses += [step.loss for step in trainer.train_batch(Batch(number, tuple(graded), number)).steps]
    return losses


def tasks_of(config: Config, curriculum: Curriculum, number: int) -> Iterator[Task]:
    """The tasks of a batch: whole groups in the order of the curriculum."""
    prompts = {problem.problem_id: problem.prompt for problem in PROBLEMS}
    section, num_groups = config.generation.sampling, BATCH_SIZE // GROUP_SIZE
    for group in range(number * num_groups, (number + 1) * num_groups):
        for member in range(GROUP_SIZE):
            rollout_id, problem_id = f"g{group:06d}-{member}", curriculum.schedule.at(group).problem_id
            seed = task_seed(config.run.seed, rollout_id)
            sampling = Sampling(section.temperature, section.top_p, section.max_new_tokens, seed)
            yield Task(rollout_id, f"g{group:06d}", problem_id, prompts[problem_id], sampling)


async def grade(broker: BrokerClient) -> None:
    """Grade like a verifier, with the invented judge."""
    while True:
        leased = await broker.lease_grading(16, 1.0)
        items = [(item.lease.lease_id, item.rollout_id, verdict_of(item.text)) for item in leased.gradings]
        await broker.submit_verdicts(items)
        if leased.run_finished:
            return


async def run_services(config: Config, url: str, problems: ProblemIndex) -> None:
    """Run the real broker, generation worker and learner over gRPC until the run is finished."""
    policy = config.run.folder / "policy"
    async with AsyncExitStack() as stack:
        address = await serve_broker(Broker(config, url, problems), config, asyncio.Event(), stack)
        generation, verifier, learner = [
            await stack.enter_async_context(BrokerClient(address, f"{name}-h-0-1"))
            for name in ("generation", "verifier", "learner")
        ]
        engine = await stack.enter_async_context(open_engine(config, policy, GenerationMetrics()))
        policies = Policies(engine)
        rollouts = Rollouts(open_environment(config, policy), engine, policies)
        worker = LearnerWorker(config, learner, LearnerMetrics(CollectorRegistry()), LearnerCore(config))
        stack.push_async_callback(worker.close)
        sampling = RolloutWorker(generation, rollouts, policies, max_running=1, prefetch=2)
        others = [asyncio.ensure_future(sampling.run()), asyncio.ensure_future(grade(verifier))]
        try:
            await asyncio.wait_for(worker.run(), LIMIT_S)
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)


def index_of_problems(folder: Path) -> ProblemIndex:
    store = TestStore(FolderBlobs(folder))
    build_index(PROBLEMS, folder / "problems.sqlite", store)
    return ProblemIndex(folder / "problems.sqlite", store)


@pytest.mark.heavy
async def test_with_k_1_and_one_step_the_services_train_as_a_synchronous_loop(broker_rig: Any, tmp_path: Path) -> None:
    """The staleness of every token is 0, and the losses of 20 steps are equal, bit for bit."""
    config = config_of(tmp_path)
    policy = config.run.folder / "policy"
    write_policy_folder(policy, random_policy(0))
    await run_services(config, broker_rig.url, index_of_problems(tmp_path / "problems"))
    lines = [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, NUM_BATCHES + 1))
    assert [line["staleness_max"] for line in lines] == [0] * NUM_BATCHES
    samples = [json.loads(line) for line in (config.run.folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == NUM_BATCHES * BATCH_SIZE
    assert all(sample["version_range"] == [sample["step"] - 1] * 2 for sample in samples)
    losses = [line["loss"] for line in lines]
    assert len(set(losses)) > NUM_BATCHES // 2, "the losses must differ between steps, or equal losses prove nothing"
    assert losses == await synchronous_losses(config, policy, tmp_path / "synchronous")
