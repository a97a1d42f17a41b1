"""The curriculum's state in a real Redis: statistics, cursor, restarts, loss, and the cap on filtering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.services.conftest import BrokerRig

from nouscoder.broker.core import Broker
from nouscoder.domain.curriculum import CurriculumState, ProblemStatistics
from nouscoder.domain.learner_state import RunIdentity, TrainedGroups, TrainedState
from nouscoder.domain.lease import LeasedTask, LeasedTasks
from nouscoder.domain.verdict import VerdictKind

NewBroker = Callable[..., Broker]
GEN, LEARNER = "generation-h-0-1", "learner-1"
SOLVED = {"p1", "p4"}


def problems_of(tasks: tuple[LeasedTask, ...]) -> list[str]:
    """The problem of each group, in order."""
    return list({item.task.group_id: item.task.problem_id for item in tasks}.values())


async def group(broker: Broker, rig: BrokerRig, kind_of: Callable[[str], VerdictKind] | None = None) -> str:
    """Sample and grade one group; answers its problem. Solved problems are always accepted, the others never."""
    tasks = await rig.sample(broker, 4)
    (problem,) = problems_of(tasks)
    always = VerdictKind.ACCEPTED if problem in SOLVED else VerdictKind.WRONG_ANSWER
    await rig.grade(broker, kind_of or (lambda _: always))
    return problem


async def opened(new_broker: NewBroker, rig: BrokerRig, *overrides: str) -> Broker:
    broker = new_broker(*overrides)
    await broker.publish_policy(rig.manifest(0))
    return broker


def by_problem(state: CurriculumState) -> dict[str, ProblemStatistics]:
    return {record.problem_id: record for record in state.problems}


async def test_every_complete_group_is_in_the_record_of_its_problem(
    new_broker: NewBroker, broker_rig: BrokerRig
) -> None:
    broker = await opened(new_broker, broker_rig)
    assert await broker.read_curriculum() == CurriculumState()
    first = await group(broker, broker_rig, broker_rig.mixed)
    order = [first, *[await group(broker, broker_rig) for _ in range(6)]]
    assert order[6] != order[5]
    state = await broker.read_curriculum()
    records = by_problem(state)
    assert (state.cursor, set(records)) == (7, set(order))
    second_time = order.index(order[6])  # the second epoch begins
    for place, problem in enumerate(order[:6]):
        again = place == second_time
        accepted = [4 if problem in SOLVED else 0] * (1 + again)
        if place == 0:
            accepted[0] = 2
        record = records[problem]
        assert record.groups == len(accepted)
        assert record.filtered == sum(count in (0, 4) for count in accepted)
        assert (record.sampled, record.accepted) == (4 * len(accepted), sum(accepted))
        assert record.history == tuple((count, 4) for count in accepted)
        assert record.place == (6 if again else place)
        solved_last = accepted[::-1].index(next((c for c in accepted[::-1] if c != 4), 4)) if accepted[-1] == 4 else 0
        assert record.solved_in_row == (len(accepted) if set(accepted) == {4} else solved_last)


async def test_only_graded_members_count_and_the_history_is_bounded(
    new_broker: NewBroker, broker_rig: BrokerRig
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.max_regrades=1", "broker.dead_letters=1")
    await broker_rig.sample(broker, 4)
    for _ in range(2):
        await broker_rig.grade(
            broker, lambda name: VerdictKind.INTERNAL_ERROR if name.endswith("-0") else VerdictKind.ACCEPTED
        )
    (record,) = (await broker.read_curriculum()).problems
    assert (record.sampled, record.accepted, record.history) == (3, 3, ((3, 3),))
    for _ in range(66):
        await group(broker, broker_rig)
    records = (await broker.read_curriculum()).problems
    assert len(records) == 6
    assert sum(record.groups for record in records) == 67
    assert {len(record.history) for record in records} == {8}
    assert (await broker.status()).ledger.balanced


async def test_solved_problems_are_retired_and_asked_again_and_a_restart_changes_nothing(
    new_broker: NewBroker, broker_rig: BrokerRig
) -> None:
    settings = ("broker.curriculum.retire_after=1", "broker.curriculum.recheck_epochs=2")
    broker, other = [await opened(new_broker, broker_rig, *settings) for _ in range(2)]
    order = [await group(broker, broker_rig) for _ in range(26)]
    epochs = [order[:6], order[6:10], order[10:14], order[14:20], order[20:24]]
    assert [set(epoch) >= SOLVED for epoch in epochs] == [True, False, False, True, False]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    again = []
    for _ in range(26):
        restarted = new_broker(config=other._config)
        again.append(await group(restarted, broker_rig))
    assert again == order
    assert await other.read_curriculum() == await broker.read_curriculum()


async def test_a_run_whose_problems_are_all_retired_goes_on_with_the_recheck(
    new_broker: NewBroker, broker_rig: BrokerRig
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.curriculum.retire_after=1")
    for _ in range(12):
        await group(broker, broker_rig, lambda _: VerdictKind.ACCEPTED)
    state = await broker.read_curriculum()
    assert {record.groups for record in state.problems} == {2}
    assert state.cursor == 24, "epochs 1 and 2 left all problems out"


FOR_GOOD = ("broker.curriculum.retire_after=1", "broker.curriculum.recheck_epochs=0")


async def test_a_problem_retired_for_good_never_returns_and_a_run_without_problems_says_so(
    new_broker: NewBroker, broker_rig: BrokerRig
) -> None:
    broker = await opened(new_broker, broker_rig, *FOR_GOOD)
    order = [await group(broker, broker_rig) for _ in range(26)]
    assert {problem: order.count(problem) for problem in SOLVED} == dict.fromkeys(SOLVED, 1)
    assert not (await broker.status()).all_retired
    for _ in range(4):
        await group(broker, broker_rig, lambda _: VerdictKind.ACCEPTED)
    assert await broker.lease_tasks(GEN, 4, 0.0) == LeasedTasks()
    assert (await broker.status()).all_retired
    restarted = new_broker(config=broker._config)
    assert await restarted.lease_tasks(GEN, 4, 0.0) == LeasedTasks()
    assert (await restarted.status()).all_retired


async def test_a_later_group_of_a_problem_retired_for_good_does_not_bring_it_back(
    new_broker: NewBroker, broker_rig: BrokerRig
) -> None:
    subset = ("broker.curriculum.name=subset", 'broker.curriculum.problem_ids=["p1"]')
    broker = await opened(new_broker, broker_rig, *FOR_GOOD, *subset, "broker.pipeline_k=20")
    tasks = await broker_rig.sample(broker, 8)
    assert problems_of(tasks) == ["p1", "p1"]
    first = tasks[0].task.group_id
    await broker_rig.grade(
        broker, lambda name: VerdictKind.ACCEPTED if name.startswith(first) else VerdictKind.WRONG_ANSWER
    )
    (record,) = (await broker.read_curriculum()).problems
    assert (record.groups, record.solved_in_row) == (2, 1)
    assert await broker.lease_tasks(GEN, 4, 0.0) == LeasedTasks()
    assert (await broker.status()).all_retired, "of the six problems only p1 is in the curriculum"


async def test_two_brokers_on_one_redis_ask_each_place_once(new_broker: NewBroker, broker_rig: BrokerRig) -> None:
    settings = ("broker.curriculum.retire_after=1", "broker.pipeline_k=20")
    first = await opened(new_broker, broker_rig, *settings)
    second = new_broker(config=first._config)
    for _ in range(10):
        for broker in (first, second):
            await group(broker, broker_rig)
    alone = await opened(new_broker, broker_rig, *settings)
    for _ in range(20):
        await group(alone, broker_rig)
    assert await alone.read_curriculum() == await first.read_curriculum() == await second.read_curriculum()


async def test_a_wiped_redis_gets_statistics_and_cursor_back_from_the_learners_copy(
    new_broker: NewBroker, broker_rig: BrokerRig
) -> None:
    books = TrainedState(RunIdentity("ab" * 16, "/runs/test", 0, 4), 0, 0, 0, TrainedGroups(), None)
    broker = new_broker()
    await broker.restore_run(books)
    await broker.publish_policy(broker_rig.manifest(0))
    order = [await group(broker, broker_rig) for _ in range(4)]
    copy = await broker.read_curriculum()
    order += [await group(broker, broker_rig) for _ in range(4)]
    newer = await broker.read_curriculum()
    with_copy = TrainedState(books.identity, 0, 0, 0, TrainedGroups(), broker_rig.manifest(0), copy)
    await broker.restore_run(with_copy)
    assert await broker.read_curriculum() == newer, "a copy that is older changes nothing"

    await wipe(broker)
    restarted = new_broker(config=broker._config)
    restored = await restarted.restore_run(with_copy)
    assert restored.was_behind or restored.rollouts_lost == 0
    assert by_problem(await restarted.read_curriculum()) == by_problem(copy)
    assert await group(restarted, broker_rig) == order[4], "it goes on at the place of the copy"
    assert (await restarted.status()).ledger.balanced

    await wipe(restarted)
    await restarted.restore_run(with_copy)
    assert (await restarted.read_curriculum()).cursor == 5, "a broker that lives knows how far it came"


async def wipe(broker: Broker) -> None:
    async for key in broker.store.redis.scan_iter(match=f"{broker.store.prefix}*", count=1000):
        await broker.store.redis.delete(key)


async def test_after_so_many_filtered_groups_the_batch_is_made_of_what_there_is(
    new_broker: NewBroker, broker_rig: BrokerRig
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.max_filtered_groups=3", "broker.pipeline_k=3")

    async def made() -> Any:
        return (await broker.lease_batch(LEARNER, 0)).batch

    for _ in range(4):
        await group(broker, broker_rig)
    assert await made() is None
    await group(broker, broker_rig)
    batch = await made()
    assert batch is not None
    assert len(batch.rollouts) == 8
    assert (await broker.status()).ledger.filtered == 12
    for _ in range(3):
        await group(broker, broker_rig)
    assert (await broker.status()).ledger.filtered == 24, "the next batch has a bound of its own"
    assert (await broker.status()).ledger.balanced


async def test_over_sampling_admits_more_groups_and_no_token_is_older_than_before(
    new_broker: NewBroker, broker_rig: BrokerRig
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.pipeline_k=1", "broker.over_sampling=2.5")
    assert len(await broker_rig.sample(broker, 100)) == 20, "2.5 * 8 rollouts"
    await broker_rig.grade(broker, broker_rig.mixed)
    first = (await broker.lease_batch(LEARNER, 0)).batch
    assert first is not None
    await broker.publish_policy(broker_rig.manifest(1))
    await broker.commit_batch(0, 1)
    assert (await broker.lease_batch(LEARNER, 0)).batch is None
    ledger = (await broker.status()).ledger
    assert (ledger.trained, ledger.stale, ledger.balanced) == (8, 12, True), "the rest is too old for batch 1"
    assert len(await broker_rig.sample(broker, 100, version=1)) == 20
