"""Fixtures of the broker's tests: one real Redis for the session, with a fresh run for each test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from nouscoder.broker import streams
from nouscoder.broker.core import Broker
from nouscoder.broker.redis_server import start_redis
from nouscoder.broker.store import RunRules, Store
from nouscoder.config import Config, SingleTurnSection, load_config
from nouscoder.data.problem_index import ProblemIndex, build_index
from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.batch import EncodedBatch, RecordedBatch
from nouscoder.domain.lease import LeasedTask, RecordedGrading
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.domain.problem import Problem
from nouscoder.domain.rollout import Rollout, Task, assemble_rollout
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.domain.tokens import Completion, FinishReason, VersionSpan, float32, int32
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.generation.environments.prompts import SingleTurn
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, load_tokenizer
from nouscoder.rpc.pairs import BATCH, HEADER, PASSED_BATCH
from nouscoder.store.blobs import FolderBlobs
from nouscoder.store.rollout_record import encode_rollout
from nouscoder.store.tests import TestStore

_runs = itertools.count()


class BrokerRig:
    """Makes brokers of fresh runs in one Redis, and the records that workers send."""

    problems = tuple(
        Problem(
            problem_id=f"p{i}",
            prompt=f"problem {i}",
            tests=StdinTests((StdinCase("1\n", f"hidden output {i}\n"),)),
            text_is_code=True,
            prompt_template=f"{i}: {{prompt}}",
            public_tests=StdinTests((StdinCase(f"public {i}\n", "shown\n"),)),
        )
        for i in range(6)
    )

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        store = TestStore(FolderBlobs(folder))
        build_index(self.problems, folder / "problems.sqlite", store)
        self.index = ProblemIndex(folder / "problems.sqlite", store)

    def config(self, *overrides: str) -> Config:
        """The configuration of a new run with G = 4, B = 8, k = 2, and the overrides."""
        small = ["broker.group_size=4", "broker.batch_size=8", "broker.pipeline_k=2"]
        return load_config(None, [f"run.name=test-{next(_runs)}", *small, *overrides])

    def broker(self, config: Config) -> Broker:
        """A broker. A second one with the same configuration is a restarted one."""
        return Broker(config, self.url, self.index)

    def impatient_store(self, broker: Broker) -> Store:
        """The store of the same run with rules by which every lease has expired."""
        section = broker._config.broker.model_copy(update={"lease_s": 1e-9, "batch_lease_s": 1e-9})
        return Store(self.url, broker._config.run.name, RunRules.of(section))

    async def impatient_sweep(self, broker: Broker) -> None:
        """Take every lease back."""
        impatient = self.impatient_store(broker)
        await streams.sweep(impatient)
        await impatient.close()

    @staticmethod
    def manifest(version: int, sha256: str = "a" * 64) -> PolicyManifest:
        return PolicyManifest(version, version, f"/policies/{version:08d}", (Shard("model.safetensors", sha256, 10),))

    @staticmethod
    def rollout(task: Task, version: int = 0) -> Rollout:
        completion = Completion(
            int32([3, 4, 5]), float32([-0.5, -0.25, -0.125]), (VersionSpan(version, 3),), FinishReason.STOP
        )
        return assemble_rollout(task, [int32([1, 2]), completion], f"print('{task.rollout_id}')")

    @staticmethod
    def read(batch: EncodedBatch) -> RecordedBatch:
        """A batch of the broker as the learner reads it."""
        return BATCH.decode(PASSED_BATCH.encode(batch))

    @classmethod
    def groups(cls, batch: EncodedBatch) -> dict[str, list[str]]:
        """The rollout ids of a batch, by group, in order."""
        found: dict[str, list[str]] = {}
        for recorded in cls.read(batch).rollouts:
            found.setdefault(recorded.header.group_id, []).append(recorded.header.rollout_id)
        return found

    def sampled(self, item: LeasedTask, version: int = 0) -> tuple[str, bytes, bytes]:
        """The rollout that a generation worker submits for a leased task."""
        header, record = encode_rollout(self.rollout(item.task, version))
        return item.lease.lease_id, HEADER.encode(header), record

    @staticmethod
    def verdict(kind: VerdictKind = VerdictKind.ACCEPTED) -> Verdict:
        passed = int(kind is VerdictKind.ACCEPTED)
        return Verdict(kind=kind, passed=passed, total=1, graded=1, duration_s=0.01, backend="test")

    async def sample(self, broker: Broker, max_tasks: int = 100, version: int = 0) -> tuple[LeasedTask, ...]:
        """Lease and submit rollouts as one generation worker."""
        leased = (await broker.lease_tasks("generation-h-0-1", max_tasks, 0)).tasks
        submitted = [self.sampled(item, version) for item in leased]
        assert await broker.submit_rollouts("generation-h-0-1", submitted) == []
        return leased

    async def grade(self, broker: Broker, kind_of: Callable[[str], VerdictKind]) -> tuple[RecordedGrading, ...]:
        """Lease and grade all rollouts as one grading worker. `kind_of` maps a rollout id to its verdict."""
        leased = (await broker.lease_grading("verifier-h-0-1", 1000, 0)).gradings
        items = [(item.lease.lease_id, item.rollout_id, self.verdict(kind_of(item.rollout_id))) for item in leased]
        refused = await broker.submit_verdicts("verifier-h-0-1", items)
        # A group that loses too many members is cancelled, so verdicts of its last member are refused.
        assert not refused or any(verdict.is_ours for _, _, verdict in items)
        return leased

    @staticmethod
    def mixed(rollout_id: str) -> VerdictKind:
        """A verdict kind with which half of every group is accepted."""
        return VerdictKind.ACCEPTED if int(rollout_id[-1]) % 2 else VerdictKind.WRONG_ANSWER


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    """The demo's tokenizer, loaded from a policy folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    CharTokenizer().save(folder)
    return load_tokenizer(folder)


@pytest.fixture
def single_turn(tokenizer: PolicyTokenizer) -> SingleTurn:
    """The environment for single-turn code with that tokenizer."""
    return SingleTurn(tokenizer, SingleTurnSection())


@pytest.fixture(scope="session")
def broker_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerRig]:
    server = start_redis(Path(tmp_path_factory.mktemp("redis")))
    yield BrokerRig(server.url, tmp_path_factory.mktemp("problems"))
    server.close()


@pytest.fixture
async def new_broker(broker_rig: BrokerRig) -> AsyncIterator[Callable[..., Broker]]:
    """Makes brokers of a fresh run with overrides, or of a given configuration. Closes them after the test."""
    made: list[Broker] = []

    def make(*overrides: str, config: Config | None = None) -> Broker:
        made.append(broker_rig.broker(config or broker_rig.config(*overrides)))
        return made[-1]

    yield make
    for broker in made:
        await broker.close()


@pytest.fixture
def _restore_determinism() -> Iterator[None]:
    """What a learner sets for all of torch is as before after the test."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a learner: one thread of torch, and operations that give the same bits each time."""
    import torch

    from nouscoder.learner.loading import prepare_thread

    threads = torch.get_num_threads()
    prepare_thread(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
