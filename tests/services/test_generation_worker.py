"""The worker loop with a broker in memory that has the lease rules of the real one."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from nouscoder.domain.lease import Lease, LeasedTask, LeasedTasks, LeaseLoss, WorkReport
from nouscoder.domain.partial import PartialRollout
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.submission import StdinTests, Submission
from nouscoder.domain.tokens import Completion
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.generation import rollouts as rollouts_module
from nouscoder.generation import worker as worker_module
from nouscoder.generation.engines.base import Engine, EngineStopped
from nouscoder.generation.engines.fake import FakeEngine
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.environments.base import Environment, Sampler, SessionAbandoned, ToolUnavailable
from nouscoder.generation.environments.prompts import SingleTurn
from nouscoder.generation.environments.tools import SessionCalls, Tools
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.rollouts import Rollouts
from nouscoder.generation.weights import policies
from nouscoder.generation.weights.errors import PolicyGone, PolicyUnusable
from nouscoder.generation.weights.policies import Policies
from nouscoder.generation.weights.source import FolderSource
from nouscoder.generation.worker import RolloutWorker
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerRefused, PeerUnreachable
from nouscoder.rpc.worker import LeaseKeeper

MAX_RUNNING, PREFETCH = 4, 2


def published(folder: Path, version: int) -> PolicyManifest:
    """A file that the fake engine accepts as weights, and its manifest."""
    data = (8).to_bytes(8, "little") + b"weights" + bytes([version])
    path = folder / f"{version}.safetensors"
    path.write_bytes(data)
    shard = Shard(path.name, hashlib.sha256(data).hexdigest(), len(data))
    return PolicyManifest(version, version, str(folder), (shard,))


def held_by(worker: RolloutWorker) -> int:
    return len(worker._held)


@dataclass
class MemoryBroker:
    """A broker with tasks to lease, which records the submitted rollouts."""

    tasks: list[Task] = field(default_factory=list)
    away: bool = False
    finished: bool = False
    expires_in_s: float = 0.3
    submitted: list[tuple[str, Rollout]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    reason: LeaseLoss = LeaseLoss.EXPIRED
    oldest: dict[str, int] = field(default_factory=dict)
    leased: dict[str, str] = field(default_factory=dict)
    manifests: asyncio.Queue[PolicyManifest] = field(default_factory=asyncio.Queue)
    num_calls: int = 0
    beats: list[set[str]] = field(default_factory=list)
    told: list[tuple[dict[str, int], bool]] = field(default_factory=list)
    has_released: bool = False
    given_back: list[str] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    never: dict[str, str] = field(default_factory=dict)
    unwelcome: str = ""

    async def lease_tasks(self, max_tasks: int, wait_s: float = 10.0) -> LeasedTasks:
        self.num_calls += 1
        await asyncio.sleep(0.005)
        if self.away:
            raise PeerUnreachable("the broker has not answered")
        given, self.tasks = self.tasks[:max_tasks], self.tasks[max_tasks:]
        leases = []
        for task in given:
            lease_id = f"lease {len(self.leased)}"
            self.leased[lease_id] = task.rollout_id
            leases.append(LeasedTask(Lease(lease_id, self.expires_in_s, 1), task))
        return LeasedTasks(tuple(leases), self.finished)

    async def submit_rollouts(self, rollouts: Iterable[tuple[str, Rollout]]) -> frozenset[str]:
        pairs = list(rollouts)
        await asyncio.sleep(0.005)
        if self.away:
            raise PeerUnreachable("the broker has not answered")
        if any(rollout.rollout_id == self.unwelcome for _, rollout in pairs):
            raise PeerRefused("the lease sent with a rollout is on another rollout")
        refused = {rollout.rollout_id for lease_id, rollout in pairs if lease_id in self.lost}
        self.submitted += [pair for pair in pairs if pair[1].rollout_id not in refused]
        self.refused |= refused
        return frozenset(refused)

    async def keep_partials(self, pieces: Mapping[str, PartialRollout]) -> dict[str, int | None]:
        raise PeerRefused("this broker keeps no partial rollouts")

    async def watch_policy(self) -> AsyncIterator[PolicyManifest]:
        while True:
            yield await self.manifests.get()

    async def release_leases(
        self, lease_ids: Iterable[str] = (), refused: str = "", *, abandoned: bool = False
    ) -> None:
        returned = list(lease_ids)
        if abandoned:
            self.abandoned += [self.leased[lease_id] for lease_id in returned]
            return
        if refused:
            self.never |= {self.leased[lease_id]: refused for lease_id in returned}
            return
        self.given_back += [self.leased[lease_id] for lease_id in returned]
        self.has_released = not returned

    def keep_leases(self, report: Callable[[], WorkReport]) -> LeaseKeeper:
        return LeaseKeeper(self._heartbeat, report)

    async def _heartbeat(self, lease_ids: Sequence[str], report: WorkReport | None = None) -> dict[str, LeaseLoss]:
        assert report is not None
        asked = set(lease_ids)
        self.beats.append(asked)
        progress = {self.leased[name]: moved for name, moved in report.progress.items()}
        self.told.append((progress, report.paused))
        self.oldest |= {self.leased[name]: version for name, version in report.oldest_versions.items()}
        return dict.fromkeys(asked & self.lost, self.reason)

    @property
    def ids(self) -> list[str]:
        return sorted(rollout.rollout_id for _, rollout in self.submitted)


def tasks(count: int, max_new_tokens: int = 20) -> list[Task]:
    return [
        Task(f"r{n:03}", f"g{n // 4}", "p", f"prompt {n}", Sampling(max_new_tokens=max_new_tokens, seed=n))
        for n in range(count)
    ]


@dataclass
class Bench:
    broker: MemoryBroker
    engine: Engine
    policies: Policies
    worker: RolloutWorker
    running: asyncio.Task[None]


Working = Callable[[MemoryBroker, Path | None], AbstractAsyncContextManager[Bench]]


@pytest.fixture
def working(single_turn: SingleTurn) -> Working:
    @asynccontextmanager
    async def work(broker: MemoryBroker, folder: Path | None) -> AsyncIterator[Bench]:
        step_engine = FakeEngine(max_running=MAX_RUNNING, max_tokens_total=100)
        async with SteppedEngine(step_engine, GenerationMetrics()) as engine:
            policies = Policies(engine)
            if folder is not None:
                broker.manifests.put_nowait(published(folder, 0))
            rollouts = Rollouts(single_turn, engine, policies)
            worker = RolloutWorker(cast(BrokerClient, broker), rollouts, policies, MAX_RUNNING, PREFETCH)
            running = asyncio.create_task(worker.run())
            try:
                yield Bench(broker, engine, policies, worker, running)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    return work


async def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_every_leased_task_is_submitted_once_under_its_lease_and_few_are_held(
    working: Working, tmp_path: Path
) -> None:
    broker = MemoryBroker(tasks(40))
    async with working(broker, tmp_path) as bench:
        most = 0

        def all_in() -> bool:
            nonlocal most
            most = max(most, held_by(bench.worker))
            return len(broker.submitted) == 40

        await until(all_in)
        assert broker.ids == [f"r{n:03}" for n in range(40)]
        assert all(broker.leased[lease_id] == rollout.rollout_id for lease_id, rollout in broker.submitted)
        assert 0 < most <= MAX_RUNNING + PREFETCH
        await until(lambda: held_by(bench.worker) == 0)


async def test_nothing_is_leased_before_a_policy_is_known(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker(tasks(3))
    async with working(broker, None) as bench:
        await asyncio.sleep(0.1)
        assert broker.num_calls == 0
        broker.manifests.put_nowait(published(tmp_path, 5))
        await until(lambda: len(broker.submitted) == 3)
        assert {rollout.oldest_version for _, rollout in broker.submitted} == {5}
        assert bench.engine.policy_version == 5


async def test_a_newer_policy_reaches_running_rollouts_and_an_older_one_is_ignored(
    working: Working, tmp_path: Path
) -> None:
    broker = MemoryBroker()
    async with working(broker, tmp_path) as bench:
        await until(lambda: bench.policies.current is not None)
        await bench.engine.pause(60)
        broker.tasks = tasks(6)
        await until(lambda: held_by(bench.worker) == 6)
        broker.manifests.put_nowait(published(tmp_path, 2))
        broker.manifests.put_nowait(published(tmp_path, 1))
        await until(lambda: broker.manifests.empty() and bench.engine.policy_version == 2)
        await bench.engine.resume()
        await until(lambda: len(broker.submitted) == 6)
        assert {rollout.newest_version for _, rollout in broker.submitted} == {2}
        assert bench.engine.policy_version == 2


async def test_a_stopped_worker_submits_finished_rollouts(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with working(broker, tmp_path) as bench:
        await until(lambda: bench.policies.current is not None)
        submit = broker.submit_rollouts
        calls: list[int] = []

        async def first_stuck(rollouts: Iterable[tuple[str, Rollout]]) -> frozenset[str]:
            calls.append(1)
            if len(calls) == 1:
                await asyncio.Event().wait()  # cancelled during this call
            return await submit(rollouts)

        broker.submit_rollouts = first_stuck  # type: ignore[method-assign]
        broker.tasks = tasks(3)
        await until(lambda: bool(calls) and bench.engine.num_running + bench.engine.num_waiting == 0)
        assert broker.submitted == []
        bench.running.cancel()
        await asyncio.gather(bench.running, return_exceptions=True)
        assert broker.ids == ["r000", "r001", "r002"]
        assert held_by(bench.worker) == 0
        assert broker.has_released, "others get the rest at once"


@pytest.mark.parametrize(
    ("prompt", "reason"), [("9" * 120, "leaves no room in a total of 100"), ("", "the prompt cannot be encoded")]
)
async def test_a_task_of_which_no_rollout_can_be_made_goes_back_with_the_reason(
    working: Working, tmp_path: Path, prompt: str, reason: str
) -> None:
    first, *others = tasks(6)
    broker = MemoryBroker([replace(first, prompt=prompt), *others])
    async with working(broker, tmp_path) as bench:
        await until(lambda: len(broker.submitted) == 5 and held_by(bench.worker) == 0)
        await until(lambda: bool(broker.never))
        assert list(broker.never) == ["r000"]
        assert reason in broker.never["r000"]
        assert broker.given_back == []


async def test_a_rollout_that_the_broker_refuses_costs_only_itself(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker(unwelcome="r003")
    async with working(broker, tmp_path) as bench:
        await until(lambda: bench.policies.current is not None)
        await bench.engine.pause(60)
        broker.tasks = tasks(6)
        await until(lambda: held_by(bench.worker) == 6)
        await bench.engine.resume()
        await until(lambda: len(broker.submitted) == 5 and held_by(bench.worker) == 0)
        assert "r003" not in broker.ids
        broker.tasks = tasks(8)[6:]
        await until(lambda: len(broker.submitted) == 7)
        assert not bench.running.done()


async def test_heartbeats_tell_how_far_each_rollout_is(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker(expires_in_s=0.03)
    async with working(broker, tmp_path) as bench:
        await until(lambda: bench.policies.current is not None)
        await bench.engine.pause(60)
        broker.tasks = tasks(1)
        await until(lambda: ({"r000": 0}, True) in broker.told)
        assert broker.told[-1] == ({"r000": 0}, True)
        await bench.engine.resume()
        await until(lambda: len(broker.submitted) == 1)
        assert broker.ids == ["r000"]


async def test_an_engine_that_hangs_ends_the_worker_when_its_leases_are_lost(
    working: Working, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_HUNG_S", 0.3)
    broker = MemoryBroker()
    hung = threading.Event()
    monkeypatch.setattr(FakeEngine, "step", lambda engine: hung.wait(120) and [])
    async with working(broker, tmp_path) as bench:
        await until(lambda: bench.policies.current is not None)
        broker.tasks = tasks(4)
        await until(lambda: held_by(bench.worker) == 4)
        await asyncio.sleep(0.7)
        assert not bench.running.done(), "a lease that is kept is worked on"
        broker.lost, broker.reason = set(broker.leased), LeaseLoss.PROGRESS
        with pytest.raises(EngineStopped, match="it hangs"):
            await asyncio.wait_for(bench.running, 60)
        hung.set()


async def test_a_removed_policy_is_skipped_for_a_newer_one(
    working: Working, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MemoryBroker(tasks(2))
    gone = {1, 2, 3, 4, 5}
    files_of = FolderSource.files_of

    async def pruned(source: FolderSource, manifest: PolicyManifest) -> tuple[Path, ...]:
        if manifest.policy_version in gone:
            raise PolicyGone("pruned")
        return await files_of(source, manifest)

    monkeypatch.setattr(FolderSource, "files_of", pruned)
    async with working(broker, None) as bench:
        for version in range(1, 7):
            broker.manifests.put_nowait(published(tmp_path, version))
        await until(lambda: len(broker.submitted) == 2)
        assert bench.engine.policy_version == 6
        monkeypatch.setattr("nouscoder.generation.weights.policies._NEWER_LIMIT_S", 0.05)
        gone.add(7)
        broker.manifests.put_nowait(published(tmp_path, 7))
        with pytest.raises(PolicyGone, match="no newer policy came within 0 s after a removed one"):
            await asyncio.wait_for(bench.running, 60)


async def test_a_lost_lease_cancels_its_rollout_and_frees_its_place(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with working(broker, tmp_path) as bench:
        await until(lambda: bench.policies.current is not None)
        await bench.engine.pause(60)
        broker.tasks = tasks(6)
        await until(lambda: held_by(bench.worker) == 6)
        lost = next(lease_id for lease_id, rollout_id in broker.leased.items() if rollout_id == "r002")
        broker.lost.add(lost)
        await until(lambda: held_by(bench.worker) == 5)
        num_beats = len(broker.beats)
        await until(lambda: bench.engine.num_waiting + bench.engine.num_running == 5)
        await bench.engine.resume()
        await until(lambda: len(broker.submitted) == 5)
        assert "r002" not in broker.ids
        assert not broker.refused
        assert all(lost not in beat for beat in broker.beats[num_beats:])


async def test_the_engine_stops_sampling_a_rollout_whose_group_is_stale(
    working: Working, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens were sampled under version 0; the heartbeat tells that, also when version 1 is in use."""
    sample = FakeEngine.step

    def slowly(engine: FakeEngine) -> list[tuple[str, Completion]]:
        """Each request gets a first token soon, and the others much later."""
        if engine.num_waiting or not all(engine.progress.values()):
            return sample(engine)
        time.sleep(0.005)
        return []

    monkeypatch.setattr(FakeEngine, "step", slowly)
    broker = MemoryBroker()
    async with working(broker, tmp_path) as bench:
        await until(lambda: bench.policies.current is not None)
        broker.tasks = tasks(2)
        await until(lambda: broker.oldest == {"r000": 0, "r001": 0})
        broker.manifests.put_nowait(published(tmp_path, 1))
        await until(lambda: bench.engine.policy_version == 1)
        broker.oldest.clear()
        await until(lambda: broker.oldest == {"r000": 0, "r001": 0})
        broker.lost, broker.reason = set(broker.leased), LeaseLoss.STALE
        await until(lambda: bench.engine.num_running + bench.engine.num_waiting == 0)
        await until(lambda: held_by(bench.worker) == 0)
        assert not broker.submitted
        assert not bench.running.done()


async def test_a_task_leased_again_to_the_same_worker_continues_under_the_new_lease(
    working: Working, tmp_path: Path
) -> None:
    broker = MemoryBroker(expires_in_s=60)
    async with working(broker, tmp_path) as bench:
        await until(lambda: bench.policies.current is not None)
        await bench.engine.pause(60)
        broker.tasks = tasks(1)
        await until(lambda: held_by(bench.worker) == 1)
        broker.lost.add("lease 0")
        broker.tasks = tasks(1)
        await until(lambda: len(broker.leased) == 2)
        await bench.engine.resume()
        await until(lambda: len(broker.submitted) == 1)
        assert broker.submitted[0][0] == "lease 1"
        await until(lambda: held_by(bench.worker) == 0)


async def test_the_worker_waits_for_an_unreachable_broker(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker(away=True)
    async with working(broker, tmp_path) as bench:
        await until(lambda: broker.num_calls > 3)
        broker.away = False
        broker.tasks = tasks(5)
        await until(lambda: len(broker.submitted) == 5)
        # Rollouts that were being submitted are lost, but the worker continues.
        await bench.engine.pause(60)
        broker.tasks = tasks(3)
        await until(lambda: held_by(bench.worker) == 3)
        broker.away = True
        await bench.engine.resume()
        await until(lambda: held_by(bench.worker) == 0)
        broker.away = False
        broker.tasks = [Task("later", "g", "p", "prompt", Sampling())]
        await until(lambda: "later" in broker.ids)
        assert not bench.running.done()


async def test_a_task_waits_for_the_policy_version_that_it_needs(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker([replace(tasks(1)[0], min_policy_version=2)])
    async with working(broker, tmp_path) as bench:
        await until(lambda: held_by(bench.worker) == 1)
        broker.manifests.put_nowait(published(tmp_path, 1))
        await until(lambda: bench.engine.policy_version == 1)
        assert (bench.engine.num_tokens, broker.submitted) == (0, [])
        broker.manifests.put_nowait(published(tmp_path, 2))
        await until(lambda: len(broker.submitted) == 1)
        assert broker.submitted[0][1].oldest_version == 2


async def test_the_time_of_a_pin_does_not_count_for_a_task_that_needs_a_newer_policy(
    working: Working, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pin the task is refused; this is the control."""
    monkeypatch.setattr(rollouts_module, "_POLICY_LIMIT_S", 0.1)
    broker = MemoryBroker([replace(tasks(1)[0], min_policy_version=2)])
    async with working(broker, tmp_path) as bench:
        await until(lambda: "lease 0" in broker.leased and held_by(bench.worker) == 0)
        async with bench.policies.pinned(0, limit_s=60):
            broker.tasks = [replace(tasks(2)[1], min_policy_version=2)]
            await until(lambda: held_by(bench.worker) == 1)
            broker.manifests.put_nowait(published(tmp_path, 2))
            await asyncio.sleep(0.5)  # five times the limit
            assert (held_by(bench.worker), bench.engine.policy_version) == (1, 0)
            monkeypatch.setattr(rollouts_module, "_POLICY_LIMIT_S", 60.0)
            await asyncio.sleep(0.2)  # the wait goes on with the new limit
        await until(lambda: broker.ids == ["r001"])
        assert bench.engine.policy_version == 2


async def test_a_task_that_cannot_be_sampled_is_abandoned_and_the_others_continue(
    working: Working, tmp_path: Path
) -> None:
    broker = MemoryBroker([Task("bad", "g", "p", "x" * 500, Sampling()), *tasks(4)])
    async with working(broker, tmp_path) as bench:
        await until(lambda: len(broker.submitted) == 4 and held_by(bench.worker) == 0)
        assert "bad" not in broker.ids
        beats = len(broker.beats)
        await asyncio.sleep(0.2)
        assert all("lease 0" not in beat for beat in broker.beats[beats:])


async def test_the_worker_waits_after_the_end_of_the_run(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker(finished=True)
    async with working(broker, tmp_path) as bench:
        await until(lambda: broker.num_calls == 1)
        await asyncio.sleep(0.1)
        assert broker.num_calls == 1
        assert not bench.running.done()


@pytest.mark.usefixtures("quick_retries")
async def test_a_first_policy_that_differs_from_its_manifest_ends_the_worker(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with working(broker, None) as bench:
        manifest = published(tmp_path, 0)
        (tmp_path / manifest.shards[0].name).write_bytes(b"x" * manifest.num_bytes)
        broker.manifests.put_nowait(manifest)
        with pytest.raises(PolicyUnusable, match="SHA-256"):
            await asyncio.wait_for(bench.running, 60)


@pytest.mark.usefixtures("quick_retries")
async def test_a_later_unusable_policy_leaves_the_previous_one_in_use(working: Working, tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with working(broker, tmp_path) as bench:
        await until(lambda: bench.policies.current is not None)
        missing = published(tmp_path, 1)
        (tmp_path / missing.shards[0].name).unlink()
        broker.manifests.put_nowait(missing)
        broker.manifests.put_nowait(published(tmp_path, 2))
        await until(lambda: bench.engine.policy_version == 2)
        assert not bench.running.done()


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_LOADING", replace(policies._LOADING, wait_s=0.01))


# Tools


class ToolUser:
    """An environment whose rollouts wait for a tool until `tools` lets them go; the first ones lose theirs."""

    name = "tool_user"

    def __init__(
        self, single_turn: SingleTurn, tools: Tools, num_lost: int = 0, error: type[Exception] = ToolUnavailable
    ) -> None:
        self._single_turn, self._tools, self._num_lost, self._error = single_turn, tools, num_lost, error

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        if self._num_lost:
            self._num_lost -= 1
            raise self._error("the verifier is away")
        await self._tools.grade(Submission(StdinTests(()), "x"))
        return await self._single_turn.rollout(task, sampler)


class WaitingGrader:
    def __init__(self) -> None:
        self.answer = asyncio.Event()

    def interpreter(self) -> AbstractAsyncContextManager[SessionCalls]:
        raise NotImplementedError

    async def grade(self, submission: Submission) -> Verdict:
        await self.answer.wait()
        return Verdict(VerdictKind.ACCEPTED, 1, 1, 1, 0.1, "test")


@asynccontextmanager
async def working_with_tools(
    broker: MemoryBroker, folder: Path, environment: Environment, tools: Tools
) -> AsyncIterator[RolloutWorker]:
    async with SteppedEngine(FakeEngine(max_running=MAX_RUNNING, max_tokens_total=100), GenerationMetrics()) as engine:
        policies = Policies(engine)
        broker.manifests.put_nowait(published(folder, 0))
        rollouts = Rollouts(environment, engine, policies, tools)
        worker = RolloutWorker(cast(BrokerClient, broker), rollouts, policies, MAX_RUNNING, PREFETCH)
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_rollouts_that_wait_for_a_tool_leave_their_places_to_others(
    single_turn: SingleTurn, tmp_path: Path
) -> None:
    broker, grader = MemoryBroker(tasks(40), expires_in_s=60.0), WaitingGrader()
    tools = Tools(grader, 60.0)
    async with working_with_tools(broker, tmp_path, ToolUser(single_turn, tools), tools) as worker:
        most = 2 * (MAX_RUNNING + PREFETCH)
        await until(lambda: tools.num_waiting == most, 60.0)
        assert held_by(worker) == most, "no more than twice the places are held, however many wait"
        grader.answer.set()
        await until(lambda: len(broker.submitted) == 40, 60.0)
    assert broker.ids == [task.rollout_id for task in tasks(40)]


async def test_a_rollout_whose_tool_is_away_is_given_back_at_once(single_turn: SingleTurn, tmp_path: Path) -> None:
    broker, grader = MemoryBroker(tasks(8), expires_in_s=60.0), WaitingGrader()
    grader.answer.set()
    tools = Tools(grader, 60.0)
    async with working_with_tools(broker, tmp_path, ToolUser(single_turn, tools, num_lost=3), tools) as worker:
        await until(lambda: len(broker.submitted) == 5 and len(broker.given_back) == 3 and not held_by(worker), 60.0)
    assert sorted([*broker.given_back, *broker.ids]) == [task.rollout_id for task in tasks(8)]


async def test_a_rollout_whose_agent_is_gone_is_given_up_at_once(single_turn: SingleTurn, tmp_path: Path) -> None:
    """Before, its lease ran out, and four more agents got the same rollout before the broker gave it up."""
    broker, grader = MemoryBroker(tasks(8), expires_in_s=60.0), WaitingGrader()
    grader.answer.set()
    tools = Tools(grader, 60.0)
    environment = ToolUser(single_turn, tools, num_lost=3, error=SessionAbandoned)
    async with working_with_tools(broker, tmp_path, environment, tools) as worker:
        await until(lambda: len(broker.submitted) == 5 and len(broker.abandoned) == 3 and not held_by(worker), 60.0)
    assert sorted([*broker.abandoned, *broker.ids]) == [task.rollout_id for task in tasks(8)]
    assert broker.given_back == []
