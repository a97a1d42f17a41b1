"""Redis forgets its last writes, or everything: the learner's state decides, and no rollout is trained on twice."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.bench.forgetful_redis import ForgetfulRedis
from nouscoder.broker.core import Broker
from nouscoder.broker.errors import Behind, BrokerUnavailable, Refused
from nouscoder.broker.process import serve_broker
from nouscoder.cli.status import status_text, why_stalled_text
from nouscoder.config import Config
from nouscoder.domain.learner_state import RunIdentity, TrainedGroups, TrainedState
from nouscoder.domain.lease import LeaseLoss
from nouscoder.domain.run_status import Ledger, RunStatus
from nouscoder.errors import Unusable
from nouscoder.learner.core import LearnerCore
from nouscoder.learner.metrics.prometheus import LearnerMetrics
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.learner.state.saved_batches import SavedBatchError, SavedBatches
from nouscoder.learner.worker import LearnerWorker
from nouscoder.rpc.broker_client import BrokerClient
from nouscoder.rpc.channel import PeerUnreachable
from nouscoder.rpc.pairs import HEADER
from nouscoder.run.backups import back_up, restore
from nouscoder.store.record_store import ByteRange

pytestmark = pytest.mark.alone

IDENTITY = RunIdentity("ab" * 16, "/runs/test", 0, 4)
GEN = "generation-h-0-1"


class BookKeeper:
    """Does what the learner's loop does with a broker, without training: its books are in memory and never lost."""

    def __init__(self, broker: Broker, rig: Any) -> None:
        self.broker = broker
        self._rig = rig
        self.books = TrainedState(IDENTITY, 0, 0, 0, TrainedGroups(), None)
        self.num_restored = 0
        self.num_lost = 0

    async def begin(self) -> None:
        """As at a start: the first policy, then the comparison."""
        await self._publish()
        await self.restore()

    async def restore(self) -> None:
        restored = await self.broker.restore_run(self.books)
        self.num_restored += restored.was_behind
        self.num_lost += restored.rollouts_lost

    async def train(self) -> bool:
        """Lease, train and commit a batch; False when there is none yet. A group trained twice raises ValueError."""
        leased = await self._or_restore(self.broker.lease_batch("learner-1", 0, IDENTITY.run_id, self.books.batches))
        if leased is None or leased.batch is None:
            return False
        await self.train_on(leased.batch)
        return True

    async def train_on(self, batch: Any) -> None:
        done = self.books
        numbers = self._rig.read(batch).group_numbers
        groups = done.groups.plus(numbers)
        num_rollouts = done.rollouts + len(batch.rollouts)
        self.books = TrainedState(IDENTITY, done.batches + 1, done.step + 1, num_rollouts, groups, done.policy)
        await self._or_restore(self.broker.commit_batch(batch.batch_id, self.books.step, sorted(numbers)))
        await self._publish()

    async def _publish(self) -> None:
        manifest = self._rig.manifest(self.books.batches, sha256=f"{self.books.batches:064x}")
        self.books = replace(self.books, policy=manifest)
        await self._or_restore(self.broker.publish_policy(manifest))

    async def _or_restore(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except Behind:
            await self.restore()
            return None


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ForgetfulRedis]:
    server = ForgetfulRedis(tmp_path / "redis")
    yield server
    server.close()


@pytest.fixture
async def learner(redis: ForgetfulRedis, broker_rig: Any) -> AsyncIterator[BookKeeper]:
    broker = Broker(broker_rig.config(), redis.url, broker_rig.index)
    keeper = BookKeeper(broker, broker_rig)
    await keeper.begin()
    yield keeper
    await broker.close()


async def work(learner: BookKeeper, rig: Any) -> None:
    """Everything that can be sampled and graded now is."""
    newest = (await learner.broker.status()).policy_version
    leased = (await learner.broker.lease_tasks(GEN, 100, 0)).tasks
    for item in leased:
        assert item.task.min_policy_version <= (newest or 0)
    await learner.broker.submit_rollouts(GEN, [rig.sampled(item, item.task.min_policy_version) for item in leased])
    await rig.grade(learner.broker, rig.mixed)


def check(learner: BookKeeper, status: RunStatus) -> None:
    assert status.ledger.balanced, status.ledger
    assert (status.batches_committed, status.policy_version) == (learner.books.batches, learner.books.batches)
    assert (status.step, status.ledger.trained) == (learner.books.step, learner.books.rollouts)


FORGETS: dict[str, Callable[[ForgetfulRedis], None]] = {
    "the last writes": ForgetfulRedis.roll_back,
    "everything": ForgetfulRedis.wipe,
}
forgets = pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS)


@forgets
async def test_committed_batches_that_redis_forgot_are_restored_and_the_run_goes_on(
    learner: BookKeeper, redis: ForgetfulRedis, broker_rig: Any, forget: Callable[[ForgetfulRedis], None]
) -> None:
    await work(learner, broker_rig)
    assert await learner.train()
    redis.remember()
    for _ in range(2):
        await work(learner, broker_rig)
        assert await learner.train()
    await work(learner, broker_rig)
    forget(redis)

    assert (await learner.broker.status()).batches_committed < 3
    assert not await learner.train(), "the call that finds Redis behind restores it"
    assert learner.num_restored == 1
    check(learner, await learner.broker.status())
    while learner.books.batches < 8:
        await work(learner, broker_rig)
        await learner.train()
        check(learner, await learner.broker.status())
    assert learner.num_restored == 1
    ledger = (await learner.broker.status()).ledger
    assert ledger.lost == learner.num_lost
    assert ledger.lost > 0


@forgets
async def test_a_learner_that_waits_for_a_batch_notices_at_its_next_call_what_redis_forgot(
    learner: BookKeeper, redis: ForgetfulRedis, broker_rig: Any, forget: Callable[[ForgetfulRedis], None]
) -> None:
    """Nobody else may wake it: no rollout can be submitted before the learner has restored the policy."""
    redis.remember()
    await work(learner, broker_rig)
    while await learner.train():
        pass
    for _ in range(3):  # from the second call on the broker knows that there is nothing to lease
        assert (
            await learner.broker.lease_batch("learner-1", 0.01, IDENTITY.run_id, learner.books.batches)
        ).batch is None
    forget(redis)
    with pytest.raises(Behind):
        await learner.broker.lease_batch("learner-1", 0.01, IDENTITY.run_id, learner.books.batches)


@forgets
async def test_a_batch_in_training_that_redis_forgot_counts_once_it_is_trained(
    learner: BookKeeper, redis: ForgetfulRedis, broker_rig: Any, forget: Callable[[ForgetfulRedis], None]
) -> None:
    await work(learner, broker_rig)
    redis.remember()
    batch = (await learner.broker.lease_batch("learner-1", 0, IDENTITY.run_id, 0)).batch
    forget(redis)
    await learner.train_on(batch)
    check(learner, await learner.broker.status())
    assert learner.num_restored == 1
    while learner.books.batches < 4:
        await work(learner, broker_rig)
        await learner.train()
    assert {0, 1} <= {number for number in range(10) if number in learner.books.groups}


async def test_what_is_in_flight_goes_on_unless_it_was_trained_on(
    learner: BookKeeper, redis: ForgetfulRedis, broker_rig: Any
) -> None:
    """Four groups are ready; two of them are trained on after the moment that Redis goes back to."""
    await work(learner, broker_rig)
    redis.remember()
    assert await learner.train()
    redis.roll_back()
    await learner.restore()
    ledger = (await learner.broker.status()).ledger
    assert (ledger.in_flight["ready"], ledger.trained, ledger.lost) == (8, 8, 0)
    assert await learner.train(), "the other two groups are the next batch"


@forgets
async def test_leases_of_the_epoch_before_are_lost(
    learner: BookKeeper, redis: ForgetfulRedis, broker_rig: Any, forget: Callable[[ForgetfulRedis], None]
) -> None:
    broker = learner.broker
    await broker_rig.sample(broker, 8)
    await broker_rig.grade(broker, broker_rig.mixed)
    await broker_rig.sample(broker, 4)
    gradings = (await broker.lease_grading("verifier-h-0-1", 4, 0)).gradings
    held = (await broker.lease_tasks(GEN, 4, 0)).tasks
    redis.remember()
    assert await learner.train()
    forget(redis)
    await learner.restore()
    assert learner.num_restored == 1

    lease_ids = [item.lease.lease_id for item in held]
    assert await broker.heartbeat(GEN, lease_ids) == dict.fromkeys(lease_ids, LeaseLoss.RESTORED)
    late = [broker_rig.sampled(item) for item in held]
    assert await broker.submit_rollouts(GEN, late) == [item.task.rollout_id for item in held]
    verdicts = [(item.lease.lease_id, item.rollout_id, broker_rig.verdict()) for item in gradings]
    assert await broker.submit_verdicts("verifier-h-0-1", verdicts) == [item.rollout_id for item in gradings]
    again = (await broker.lease_tasks(GEN, 100, 0)).tasks
    assert {item.lease.delivery for item in again} == {1}, "a restored state costs no delivery"
    known = {item.task.rollout_id for item in held} & {item.task.rollout_id for item in again}
    assert len(known) == (4 if forget is ForgetfulRedis.roll_back else 0)


async def test_a_late_record_of_the_epoch_before_never_takes_away_the_accepted_one(
    learner: BookKeeper, broker_rig: Any
) -> None:
    """A restored entry is leased again as delivery 1. The late hand-in of the first one has another record."""
    broker = learner.broker
    held = (await broker.lease_tasks(GEN, 8, 0)).tasks
    learner.books = TrainedState(IDENTITY, 1, 1, 4, TrainedGroups().plus([9]), learner.books.policy)
    await learner.restore()
    again = (await broker.lease_tasks(GEN, 8, 0)).tasks
    assert [item.task.rollout_id for item in again] == [item.task.rollout_id for item in held]
    late = await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in held])
    assert len(late) == 8, "the leases of the epoch before are lost"
    assert await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in again]) == []
    await assert_records_outlive_the_janitor(broker)


async def test_a_rollout_handed_in_again_after_its_policy_was_published_keeps_its_record(
    learner: BookKeeper, broker_rig: Any
) -> None:
    """The first hand-in is refused for now and its record is garbage; the second is accepted."""
    held = (await learner.broker.lease_tasks(GEN, 4, 0)).tasks
    newer = [broker_rig.sampled(item, version=1) for item in held]
    with pytest.raises(BrokerUnavailable, match="Redis has forgotten"):
        await learner.broker.submit_rollouts(GEN, newer)
    await learner.broker.publish_policy(broker_rig.manifest(1, sha256="c" * 64))
    assert await learner.broker.submit_rollouts(GEN, newer) == []
    await assert_records_outlive_the_janitor(learner.broker)


async def test_a_rollout_handed_in_twice_leaves_one_record(learner: BookKeeper, broker_rig: Any) -> None:
    held = (await learner.broker.lease_tasks(GEN, 4, 0)).tasks
    for _ in range(2):
        assert await learner.broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in held]) == []
    await assert_records_outlive_the_janitor(learner.broker)
    keys = [key async for key in learner.broker.store.redis.scan_iter(f"{learner.broker.store.prefix}record:*")]
    assert len(keys) == 4


async def assert_records_outlive_the_janitor(broker: Broker) -> None:
    """Check that the record of every rollout that waits for grading is there after the garbage is deleted."""
    await broker.records.delete_garbage()
    gradings = (await broker.lease_grading("verifier-h-0-1", 100, 0)).gradings
    assert gradings
    ranges = [ByteRange(item.record, 0, HEADER.decode(item.header).record_bytes) for item in gradings]
    sizes = dict.fromkeys(range(len(ranges)), 0)
    async for pieces in broker.records.stream(ranges):
        for place, data in pieces:
            sizes[place] += len(data)
    assert list(sizes.values()) == [part.num_bytes for part in ranges]


async def test_a_rollout_under_a_policy_that_redis_forgot_waits_until_the_learner_comes(
    learner: BookKeeper, redis: ForgetfulRedis, broker_rig: Any
) -> None:
    held = (await learner.broker.lease_tasks(GEN, 4, 0)).tasks
    redis.remember()
    learner.books = replace(learner.books, policy=broker_rig.manifest(1, sha256="c" * 64))
    assert learner.books.policy is not None
    await learner.broker.publish_policy(learner.books.policy)
    redis.roll_back()
    newer = [broker_rig.sampled(item, version=1) for item in held]
    with pytest.raises(BrokerUnavailable, match="Redis has forgotten"):
        await learner.broker.submit_rollouts(GEN, newer)
    await learner.restore()
    assert learner.num_restored == 0, "only the publication was forgotten, so nothing else is undone"
    assert await learner.broker.submit_rollouts(GEN, newer) == []


async def test_a_commit_of_a_batch_that_redis_holds_with_other_groups_is_not_taken(
    learner: BookKeeper, broker_rig: Any
) -> None:
    await work(learner, broker_rig)
    batch = (await learner.broker.lease_batch("learner-1", 0)).batch
    assert batch is not None
    before = await learner.broker.status()
    for groups in ([0, 2], [0], [0, 1, 2]):
        with pytest.raises(Behind, match="does not hold batch 0 as it was trained on"):
            await learner.broker.commit_batch(0, 1, groups)
    assert await learner.broker.status() == before
    assert await learner.broker.commit_batch(0, 1, [0, 1]) is False


async def test_a_commit_and_a_publication_that_were_not_heard_are_made_up_for_without_a_new_epoch(
    learner: BookKeeper, broker_rig: Any
) -> None:
    await work(learner, broker_rig)
    batch = (await learner.broker.lease_batch("learner-1", 0)).batch
    assert batch is not None
    held = (await learner.broker.lease_tasks(GEN, 8, 0)).tasks
    groups = TrainedGroups().plus(broker_rig.read(batch).group_numbers)
    learner.books = TrainedState(IDENTITY, 1, 1, 8, groups, broker_rig.manifest(1, sha256="c" * 64))
    await learner.restore()
    check(learner, await learner.broker.status())
    assert learner.num_restored == 0
    assert await learner.broker.heartbeat(GEN, [item.lease.lease_id for item in held]) == {}


async def test_another_run_folder_of_the_same_name_is_refused_by_name(learner: BookKeeper) -> None:
    other = RunIdentity("cd" * 16, "/elsewhere/test", 0, 4)
    before = await learner.broker.status()
    with pytest.raises(Refused, match=r"another run of this name, (ab){16} with 0 batches .*folder /runs/test instead"):
        await learner.broker.restore_run(replace(learner.books, identity=other))
    with pytest.raises(Behind):
        await learner.broker.lease_batch("learner-1", 0, other.run_id, 0)
    assert await learner.broker.status() == before


async def test_a_second_run_of_the_name_is_refused_before_it_starts(
    learner: BookKeeper, redis: ForgetfulRedis, broker_rig: Any, tmp_path: Path
) -> None:
    """The first goes on; its own folder is taken again, also where it has another place."""
    name = learner.broker._config.run.name
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.toml").touch()
    other = Broker(broker_rig.config(f"run.name={name}", f"run.root={tmp_path}"), redis.url, broker_rig.index)
    before = await learner.broker.status()
    for identity in (None, "cd" * 16):
        if identity:
            (folder / "identity.json").write_text(json.dumps({"run_id": identity}))
        with pytest.raises(Refused, match=rf"another run of the name {name}, (ab){{16}} of .*give this run another"):
            await other.check_state()
    assert await learner.broker.status() == before
    (folder / "identity.json").write_text(json.dumps({"run_id": learner.books.identity.run_id}))
    await other.check_state()
    await other.close()


@pytest.mark.parametrize(("setting", "value"), [("run.seed", 7), ("broker.group_size", 2)])
async def test_a_broker_with_other_settings_is_refused_by_name(
    learner: BookKeeper, redis: ForgetfulRedis, broker_rig: Any, setting: str, value: int
) -> None:
    config = broker_rig.config(f"run.name={learner.broker._config.run.name}", f"{setting}={value}")
    other = Broker(config, redis.url, broker_rig.index)
    with pytest.raises(Refused, match=rf"{setting} \d, this broker has {value}"):
        await other.check_state()
    with pytest.raises(Refused, match=rf"{setting} \d, this broker has {value}"):
        await other.restore_run(learner.books)
    await other.close()


async def test_books_that_are_behind_redis_are_refused(learner: BookKeeper, broker_rig: Any) -> None:
    await work(learner, broker_rig)
    earlier = learner.books
    assert await learner.train()
    with pytest.raises(Refused, match=r"Redis has 1 batches .* have 0 batches: checkpoints of this run are missing"):
        await learner.broker.restore_run(earlier)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.timeout(300)
async def test_whatever_redis_forgets_in_a_random_history_nothing_is_trained_on_twice(
    learner: BookKeeper, redis: ForgetfulRedis, broker_rig: Any, seed: int
) -> None:
    """`BookKeeper.train_on` raises when a group comes twice."""
    source = random.Random(seed)
    redis.remember()
    for _ in range(60):
        match source.choice(("sample", "grade", "train", "train", "remember", "roll back", "wipe", "lease")):
            case "sample":
                leased = (await learner.broker.lease_tasks(GEN, source.choice((3, 100)), 0)).tasks
                pairs = [broker_rig.sampled(item, item.task.min_policy_version) for item in leased]
                await learner.broker.submit_rollouts(GEN, pairs)
            case "grade":
                await broker_rig.grade(learner.broker, broker_rig.mixed)
            case "lease":
                await learner.broker.lease_tasks("generation-h-9-1", 2, 0)
            case "train":
                await learner.train()
            case "remember" if source.random() < 0.5:
                redis.remember()
            case "roll back" if source.random() < 0.4:
                redis.roll_back()
            case "wipe" if source.random() < 0.3:
                redis.wipe()
        assert (await learner.broker.status()).ledger.balanced
    before = learner.books.batches
    while learner.books.batches < before + 3:
        await learner.broker.lease_tasks("generation-h-9-2", 1, 0)  # frees what its former incarnation holds
        await work(learner, broker_rig)
        await learner.train()
        assert (await learner.broker.status()).ledger.balanced
        await learner.broker.lease_tasks("generation-h-9-1", 1, 0)
    check(learner, await learner.broker.status())


# With the learner's own worker, over gRPC.

NUM_BATCHES = 8
LIMIT_S = 120.0
PATIENCE_S = 300.0  # of the learner with the broker
FULL = r"Redis (uses \d+ of its 0 MiB \(maxmemory\): no group is admitted|holds as much as maxmemory allows)"
AWAY = r"broker at .* has not answered for 3 s: Redis at .* does not answer"


class RealRun:
    """A learner's worker and a broker over gRPC, with workers that sample and grade at once. `redis` has a url."""

    def __init__(self, root: Path, redis: Any, rig: Any, num_batches: int = NUM_BATCHES) -> None:
        settings = ["run.name=real", f"run.root={root}", f"run.total_batches={num_batches}", "broker.grpc=127.0.0.1:0"]
        settings += ["learner.steps_per_batch=1", "learner.peak_flops=1e9", "learner.keep_batches=10000"]
        self.config: Config = rig.config(*settings, "learner.checkpoint_every_batches=3")
        write_policy_folder(self.config.run.folder / "policy", random_policy(0))
        self._broker = Broker(self.config, redis.url, rig.index)
        self._rig = rig

    async def __aenter__(self) -> RealRun:
        self._stack = AsyncExitStack()
        address = await serve_broker(self._broker, self.config, asyncio.Event(), self._stack)
        self.client = await self._stack.enter_async_context(BrokerClient(address, "learner-1", PATIENCE_S))
        section = self.config.broker.model_copy(update={"grpc": address})
        self._at_address = self.config.model_copy(update={"broker": section})
        self._others = asyncio.ensure_future(self._sample_and_grade())
        self._stack.callback(self._others.cancel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _sample_and_grade(self) -> None:
        while True:
            try:
                leased = (await self._broker.lease_tasks(GEN, 4, 0.1)).tasks
                pairs = [self._rig.sampled(item, item.task.min_policy_version) for item in leased]
                await self._broker.submit_rollouts(GEN, pairs)
                await self._rig.grade(self._broker, self._rig.mixed)
            except (BrokerUnavailable, AssertionError):  # Redis is away, or has forgotten what was leased
                await asyncio.sleep(0.05)

    async def told(self, tell: Callable[..., Awaitable[str]], expected: str) -> None:
        """Returns once `nouscoder status` or `why-stalled` prints what is expected."""
        printed = ""
        async with asyncio.timeout(LIMIT_S):
            while not re.search(expected, printed):
                try:
                    printed = await tell(self._at_address, as_json=False)
                except PeerUnreachable as error:
                    printed = str(error)
                await asyncio.sleep(0.1)

    async def learn(self, while_it_runs: Callable[[asyncio.Future[None]], Awaitable[None]]) -> None:
        """A learner's process from its start to its end."""
        worker = LearnerWorker(self.config, self.client, LearnerMetrics(CollectorRegistry()), LearnerCore(self.config))
        run = asyncio.ensure_future(worker.run())
        try:
            await while_it_runs(run)
            await asyncio.wait({run, self._others}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            assert not self._others.done(), self._others.exception()
            assert run.done(), f"{worker.status()}, {await self.client.status()}"
            run.result()
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            await worker.close()

    async def progresses(self, run: asyncio.Future[None]) -> None:
        """Returns once another batch is committed. Raises when the learner ends, or the ledger does not balance."""
        before: int | None = None
        async with asyncio.timeout(LIMIT_S):
            while not run.done():
                status = await self.client.status()
                assert status.ledger.balanced, status.ledger
                if before is not None and status.run_id and status.batches_committed > before:
                    return
                before = status.batches_committed if before is None and status.run_id else before
                await asyncio.sleep(0.02)

    async def until_committed(self, num_batches: int, run: asyncio.Future[None]) -> None:
        while not run.done() and (await self.client.status()).batches_committed < num_batches:
            await asyncio.sleep(0.01)

    async def until_in_flight(self, run: asyncio.Future[None]) -> None:
        """Returns once there are rollouts in flight that no learner has yet."""
        while not run.done():
            in_flight = (await self.client.status()).ledger.in_flight
            if sum(number for state, number in in_flight.items() if state != "training") > 0:
                return
            await asyncio.sleep(0.01)

    def trained_groups(self) -> list[str]:
        """By the learner's own state: the saved batches, every one of which was trained on once."""
        saved = SavedBatches(self.config.run.folder / "batches", 10_000)
        return [group for number in saved.numbers() for group in saved.load(number).groups()]

    async def check(self, num_batches: int = NUM_BATCHES) -> Ledger:
        status = await self.client.status()
        groups = self.trained_groups()
        assert len(groups) == len(set(groups)) == 2 * num_batches
        assert (status.finished, status.batches_committed, status.step) == (True, num_batches, num_batches)
        assert status.ledger.balanced
        assert status.ledger.trained == 4 * len(groups)
        lines = (self.config.run.folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [*range(1, num_batches + 1)]
        return status.ledger


@forgets
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_restore_determinism")
async def test_a_learner_at_work_restores_what_redis_forgets_and_ends_the_run(
    tmp_path: Path, redis: ForgetfulRedis, broker_rig: Any, forget: Callable[[ForgetfulRedis], None]
) -> None:
    async with RealRun(tmp_path, redis, broker_rig) as real:

        async def disturb(run: asyncio.Future[None]) -> None:
            await real.until_committed(2, run)
            redis.remember()
            await real.until_committed(5, run)
            await real.until_in_flight(run)
            forget(redis)

        await real.learn(disturb)
        assert (await real.check()).lost > 0


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        pytest.param(ForgetfulRedis.fill, ForgetfulRedis.empty, id="full", marks=pytest.mark.heavy),
        pytest.param(ForgetfulRedis.stop, ForgetfulRedis.go_on, id="stopped", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_restore_determinism")
async def test_a_redis_that_is_full_or_stopped_for_a_while_costs_a_run_nothing(
    tmp_path: Path,
    redis: ForgetfulRedis,
    broker_rig: Any,
    begin: Callable[[ForgetfulRedis], None],
    end: Callable[[ForgetfulRedis], None],
) -> None:
    async with RealRun(tmp_path, redis, broker_rig) as real:

        async def disturb(run: asyncio.Future[None]) -> None:
            await real.until_committed(3, run)
            begin(redis)
            await asyncio.sleep(5)
            assert not run.done()
            end(redis)

        await real.learn(disturb)
        assert (await real.check()).lost == 0


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("begin", "end", "named"),
    [
        (ForgetfulRedis.fill, ForgetfulRedis.empty, FULL),
        (ForgetfulRedis.stop, ForgetfulRedis.go_on, AWAY),
        (ForgetfulRedis.die, ForgetfulRedis.come_back, AWAY),
    ],
    ids=["full", "stopped", "dead"],
)
@pytest.mark.usefixtures("_restore_determinism")
async def test_a_minute_without_redis_costs_a_run_nothing_and_status_names_it(
    tmp_path: Path,
    redis: ForgetfulRedis,
    broker_rig: Any,
    begin: Callable[[ForgetfulRedis], None],
    end: Callable[[ForgetfulRedis], None],
    named: str,
) -> None:
    async with RealRun(tmp_path, redis, broker_rig) as real:

        async def disturb(run: asyncio.Future[None]) -> None:
            await real.until_committed(3, run)
            begin(redis)
            over_s = time.monotonic() + 60
            while time.monotonic() < over_s:
                await real.told(status_text, named)
                await real.told(why_stalled_text, named)
                assert not run.done()
                await asyncio.sleep(5)
            end(redis)

        await real.learn(disturb)
        assert (await real.check()).lost == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "times"), [pytest.param(0, 8, marks=pytest.mark.heavy), pytest.param(1, 25, marks=pytest.mark.soak)]
)
@pytest.mark.usefixtures("_restore_determinism")
async def test_a_run_whose_redis_forgets_many_times_ends_and_trains_on_nothing_twice(
    tmp_path: Path, redis: ForgetfulRedis, broker_rig: Any, seed: int, times: int
) -> None:
    """Redis goes back by 0.1 to 5 s, or is wiped, at random moments; every status is balanced."""
    source, num_forgotten = random.Random(seed), 0
    async with RealRun(tmp_path, redis, broker_rig, num_batches=100_000) as real:

        async def disturb(run: asyncio.Future[None]) -> None:
            nonlocal num_forgotten
            while num_forgotten < times:
                redis.remember()
                await asyncio.sleep(source.uniform(0.1, 5.0))
                if run.done():
                    return
                await asyncio.to_thread(source.choice((redis.roll_back, redis.roll_back, redis.wipe)))
                num_forgotten += 1
                await real.progresses(run)
            run.cancel()

        with pytest.raises(asyncio.CancelledError):
            await real.learn(disturb)
        done = (await real.client.status()).batches_committed
        real.config = real.config.model_copy(
            update={"run": real.config.run.model_copy(update={"total_batches": done + 3})}
        )
        await real.learn(lambda run: asyncio.sleep(0))
        ledger = await real.check(done + 3)
    assert num_forgotten == times
    assert ledger.lost > 0


@forgets
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_restore_determinism")
async def test_a_learner_that_starts_on_a_redis_that_forgot_goes_on_from_its_own_books(
    tmp_path: Path, redis: ForgetfulRedis, broker_rig: Any, forget: Callable[[ForgetfulRedis], None]
) -> None:
    async with RealRun(tmp_path, redis, broker_rig, num_batches=16) as real:

        async def die(run: asyncio.Future[None]) -> None:
            await real.until_committed(2, run)
            redis.remember()
            await real.until_committed(5, run)
            run.cancel()

        with pytest.raises(asyncio.CancelledError):
            await real.learn(die)
        forget(redis)
        await real.learn(lambda run: asyncio.sleep(0))
        await real.check(16)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_restore_determinism")
async def test_a_second_run_folder_of_the_same_name_trains_nothing_and_says_why(
    tmp_path: Path, redis: ForgetfulRedis, broker_rig: Any
) -> None:
    async with RealRun(tmp_path / "first", redis, broker_rig) as real:
        await real.learn(lambda run: asyncio.sleep(0))
        await real.check()
    async with RealRun(tmp_path / "second", redis, broker_rig) as second:
        second.config = second.config.model_copy(
            update={"run": real.config.run.model_copy(update={"root": tmp_path / "second"})}
        )
        with pytest.raises(Unusable, match=r"another run of this name.*folder .*/first/real instead of"):
            await second.learn(lambda run: asyncio.sleep(0))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_restore_determinism")
async def test_a_run_that_begins_loses_no_lease(tmp_path: Path, redis: ForgetfulRedis, broker_rig: Any) -> None:
    """The broker knows the run before it knows a policy, so nothing is leased that the comparison takes back."""
    async with RealRun(tmp_path, redis, broker_rig, num_batches=1) as run:
        calls: list[str] = []
        for name in ("restore_run", "publish_policy"):
            _note_calls(run.client, name, calls)

        async def only_wait(_: asyncio.Future[None]) -> None:
            return

        await run.learn(only_wait)
        assert calls[0] == "restore_run"
        assert "publish_policy" in calls


def _note_calls(client: BrokerClient, name: str, calls: list[str]) -> None:
    """Have each call of the method noted by its name."""
    method = getattr(client, name)

    async def noted(*arguments: Any) -> Any:
        calls.append(name)
        return await method(*arguments)

    setattr(client, name, noted)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_restore_determinism")
async def test_a_run_goes_on_from_a_backup_of_its_middle_once_redis_knows_nothing_later(
    tmp_path: Path, redis: ForgetfulRedis, broker_rig: Any
) -> None:
    async with RealRun(tmp_path / "runs", redis, broker_rig, num_batches=14) as real:
        made: list[Path] = []

        async def backed_up(run: asyncio.Future[None]) -> None:
            await real.until_committed(4, run)
            made.append(await asyncio.to_thread(back_up, real.config, tmp_path / "backups", 1))
            await real.until_committed(12, run)
            run.cancel()

        with pytest.raises(asyncio.CancelledError):
            await real.learn(backed_up)
        done = restore(real.config, made[0], "later")
        assert 3 <= int(done.rpartition("at step ")[2]) < 12, done
        with pytest.raises(SavedBatchError, match=r"after a restore from a backup the run's keys in Redis must go"):
            await real.learn(lambda run: asyncio.sleep(0))
        await asyncio.to_thread(redis.wipe)
        await real.learn(lambda run: asyncio.sleep(0))
        await real.check(14)
