"""What operators and workers' ends do to a run: progress, released leases, dead letters, dropped batches, modes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nouscoder.broker.core import Broker
from nouscoder.broker.errors import InvalidRequest, Refused
from nouscoder.cli.status import status_lines
from nouscoder.domain.lease import LeasedTasks, LeaseLoss
from nouscoder.domain.run_status import GivenUpFor, RunMode
from nouscoder.domain.stall import StallCause
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.rpc.pairs import LEASED_TASKS, TASK

NewBroker = Callable[..., Broker]
GEN, OTHER, VER, LEARNER = "generation-h-0-1", "generation-h-1-1", "verifier-h-0-1", "learner-1"


async def opened(new_broker: NewBroker, rig: Any, *overrides: str) -> Broker:
    broker = new_broker(*overrides)
    await broker.publish_policy(rig.manifest(0))
    return broker


async def advance(broker: Broker, seconds: float) -> None:
    """The run's clock goes on, as if a sweeper had seen the time pass."""
    await broker.store.run("tick", "a sweeper", 0, round(1000 * seconds))


async def in_flight(broker: Broker) -> dict[str, int]:
    status = await broker.status()
    assert status.ledger.balanced
    return {state: count for state, count in status.ledger.in_flight.items() if count}


# Progress


async def test_a_lease_without_progress_is_lost_and_one_with_slow_progress_is_kept(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.sampling_progress_s=50", "broker.lease_s=100")
    hung, slow = [item.lease.lease_id for item in (await broker.lease_tasks(GEN, 2, 0)).tasks]
    lost: list[str] = []
    for tokens in range(1, 12):
        lost += await broker.heartbeat(GEN, [hung, slow], [7, tokens])
        await advance(broker, 10)
    assert set(lost) == {hung}
    assert await in_flight(broker) == {"queued": 3, "sampling": 1}
    assert len((await broker.lease_tasks(OTHER, 1, 0)).tasks) == 1, "somebody else gets it"
    assert await broker.heartbeat(GEN, [slow], [99]) == {}


async def test_a_paused_worker_and_one_that_tells_nothing_keep_their_leases(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.sampling_progress_s=5")
    paused, mute = [item.lease.lease_id for item in (await broker.lease_tasks(GEN, 2, 0)).tasks]
    for _ in range(4):
        await advance(broker, 6)
        assert await broker.heartbeat(GEN, [paused], [7], paused=True) == {}
        assert await broker.heartbeat(GEN, [mute]) == {}
    with pytest.raises(InvalidRequest, match="1 numbers of progress came with 2 leases"):
        await broker.heartbeat(GEN, [paused, mute], [1])


async def test_a_rollout_that_no_worker_gets_on_with_is_a_dead_letter_that_says_so(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.grading_progress_s=5", "broker.max_deliveries=1")
    await broker_rig.sample(broker, 4)
    (grading,) = (await broker.lease_grading(VER, 1, 0)).gradings
    await broker.heartbeat(VER, [grading.lease.lease_id], [3])
    await advance(broker, 6)
    assert await broker.heartbeat(VER, [grading.lease.lease_id], [3]) == {grading.lease.lease_id: LeaseLoss.PROGRESS}
    (letter,) = await broker.operations.dead_letters()
    assert (letter.reason, letter.stream, letter.worker_id) == (GivenUpFor.PROGRESS, "grading", VER)


# Releases


async def test_a_worker_that_stops_gives_its_work_to_others_at_once_and_no_delivery_is_spent(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.max_deliveries=2", "broker.lease_s=60")
    for number in range(5):
        worker = f"generation-h-{number}-1"
        held = (await broker.lease_tasks(worker, 16, 0)).tasks
        assert len(held) == 16
        waiting = asyncio.create_task(broker.lease_tasks(OTHER, 1, 30)) if number == 4 else None
        await asyncio.sleep(0.05)
        assert await broker.release_leases(worker) == 16
        assert await broker.release_leases(worker) == 0
        assert await broker.submit_rollouts(worker, [broker_rig.sampled(held[0])]) == [held[0].task.rollout_id]
    assert waiting is not None
    assert len((await asyncio.wait_for(waiting, 60)).tasks) == 1
    status = await broker.status()
    assert status.streams[0].dead_letters == 0
    assert await in_flight(broker) == {"queued": 15, "sampling": 1}


async def test_a_worker_that_goes_on_gives_single_leases_back(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await opened(new_broker, broker_rig, "broker.max_deliveries=1", "broker.lease_s=60")
    held = (await broker.lease_tasks(GEN, 4, 0)).tasks
    returned = [item.lease.lease_id for item in held[:2]]
    assert await broker.release_leases(OTHER, returned) == 0, "another worker holds no such lease"
    assert await broker.release_leases(GEN, returned) == 2
    assert await broker.release_leases(GEN, returned) == 0, "a lease ends once"
    assert await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in held]) == [
        item.task.rollout_id for item in held[:2]
    ]
    again = (await broker.lease_tasks(OTHER, 2, 0)).tasks
    assert {item.task.rollout_id for item in again} == {item.task.rollout_id for item in held[:2]}
    with pytest.raises(InvalidRequest, match="is not a lease of this broker"):
        await broker.release_leases(GEN, ["nonsense"])


async def test_a_task_has_the_public_tests_and_never_the_hidden_ones(new_broker: NewBroker, broker_rig: Any) -> None:
    """The bytes of the message to generation are searched for every hidden output."""
    broker = await opened(new_broker, broker_rig)
    leased = await broker.lease_tasks(GEN, 16, 0)
    for item in leased.tasks:
        message = LEASED_TASKS.to(LeasedTasks((item,))).SerializeToString()
        (problem,) = [problem for problem in broker_rig.problems if problem.problem_id == item.task.problem_id]
        assert TASK.of(TASK.to(item.task)).public_tests == problem.shown()
        assert b"shown" in message
        assert problem.tests.cases[0].output.encode() not in message


async def test_deliveries_that_were_lost_still_count_beside_those_given_back(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.max_deliveries=2")
    for number in range(2):
        await broker.lease_tasks(f"generation-h-0-{number}", 1, 0)  # a restarted worker: the former lease is lost
    assert await broker.release_leases("generation-h-0-1") == 1
    await broker.lease_tasks("generation-h-0-2", 1, 0)
    assert (await broker.status()).ledger.abandoned == 0
    await broker.lease_tasks("generation-h-0-3", 1, 0)
    assert (await broker.status()).ledger.abandoned == 1


# Dead letters


def broken(rollout_id: str) -> Verdict:
    return Verdict(VerdictKind.INTERNAL_ERROR, 0, 0, 0, 0.0, "test", detail=f"the sandbox of {rollout_id} is gone")


async def give_up_one(broker: Broker, rig: Any) -> str:
    """Sample a group, and have grading fail for its first rollout until that is given up."""
    tasks = await rig.sample(broker, 4)
    for _ in range(2):
        for item in (await broker.lease_grading(VER, 100, 0)).gradings:
            ours = item.rollout_id == tasks[0].task.rollout_id
            verdict = broken(item.rollout_id) if ours else rig.verdict(rig.mixed(item.rollout_id))
            await broker.submit_verdicts(VER, [(item.lease.lease_id, item.rollout_id, verdict)])
    return str(tasks[0].task.rollout_id)


async def test_a_dead_letter_keeps_the_cause_and_what_was_sampled(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await opened(new_broker, broker_rig, "broker.max_regrades=1")
    rollout_id = await give_up_one(broker, broker_rig)
    await broker.records.delete_garbage()
    (letter,) = await broker.operations.dead_letters()
    assert (letter.rollout_id, letter.stream, letter.reason) == (rollout_id, "grading", GivenUpFor.INTERNAL_ERROR)
    assert letter.detail == f"the sandbox of {rollout_id} is gone"
    assert (letter.regrades, letter.worker_id, letter.group_id) == (2, VER, rollout_id.partition("-")[0])
    assert letter.header is not None
    assert letter.header.rollout_id == rollout_id
    assert await broker.store.redis.exists(f"{broker.store.prefix}record:{letter.record}"), "its text can be read"
    assert await broker.operations.remove_dead_letters([letter.letter_id], requeue=False) == (1, [])
    await broker.records.delete_garbage()
    assert not await broker.store.redis.exists(f"{broker.store.prefix}record:{letter.record}")
    assert await broker.operations.dead_letters() == []
    with pytest.raises(InvalidRequest, match="not the name of a dead letter"):
        await broker.operations.remove_dead_letters(["*"], requeue=True)


async def test_a_requeued_problem_gets_the_next_group_and_the_curriculum_goes_on_after_it(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    settings = ("broker.max_regrades=1", "broker.pipeline_k=8")
    broker = await opened(new_broker, broker_rig, *settings)
    order = [(await broker.lease_tasks(OTHER, 4, 0)).tasks[0].task.problem_id for _ in range(3)]
    other = await opened(new_broker, broker_rig, *settings)
    await give_up_one(other, broker_rig)
    (letter,) = await other.operations.dead_letters()
    assert await other.operations.remove_dead_letters([letter.letter_id] * 2, requeue=True) == (1, [order[0]])
    restarted = new_broker(config=other._config)
    again = [(await restarted.lease_tasks(OTHER, 4, 0)).tasks[0].task.problem_id for _ in range(3)]
    assert again == [order[0], order[1], order[2]]
    assert (await restarted.status()).ledger.balanced


async def test_only_so_many_dead_letters_are_kept_and_the_records_of_older_ones_go(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await opened(
        new_broker, broker_rig, "broker.max_regrades=1", "broker.dead_letters=2", "broker.pipeline_k=9"
    )
    given_up = [await give_up_one(broker, broker_rig) for _ in range(4)]
    letters = await broker.operations.dead_letters()
    assert [letter.rollout_id for letter in letters] == given_up[:1:-1]
    await broker.records.delete_garbage()
    kept = [key async for key in broker.store.redis.scan_iter(match=f"{broker.store.prefix}record:g??????-0.*")]
    assert len(kept) == 2


# Batches


async def with_batch(new_broker: NewBroker, rig: Any, *overrides: str) -> Broker:
    broker = await opened(new_broker, rig, *overrides)
    await rig.sample(broker)
    await rig.grade(broker, rig.mixed)
    assert (await broker.lease_batch(LEARNER, 0)).batch is not None
    return broker


async def test_a_batch_that_fails_again_and_again_is_held_back_named_and_dropped(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await with_batch(new_broker, broker_rig)
    with pytest.raises(Refused, match="stop it first"):
        await broker.operations.drop_batch(0)
    assert not await broker.operations.report_batch_failure(7, "some other batch")
    for number in (1, 2, 3):
        assert await broker.operations.report_batch_failure(0, "loss is NaN") is (number == 3)
        assert ((await broker.lease_batch(f"learner-{number}", 0)).batch is None) is (number == 3)
    (blocker,) = await broker.why_stalled()
    assert "held back after 3 failures: loss is NaN. `nouscoder batch drop 0`" in blocker.reason
    with pytest.raises(Refused, match="not the uncommitted batch"):
        await broker.operations.drop_batch(1)
    dropped = await broker.operations.drop_batch(0)
    assert dropped == 8
    status = await broker.status()
    assert (status.ledger.abandoned, status.ledger.balanced) == (8, True)
    leased = (await broker.lease_batch("learner-9", 0)).batch
    assert leased is not None
    assert (leased.batch_id, leased.policy_version) == (0, 0), "the next batch has its number"
    await broker.publish_policy(broker_rig.manifest(1))
    assert not await broker.commit_batch(0, 1)
    assert (await broker.status()).ledger.trained == 8


async def test_a_batch_that_kills_its_learners_without_a_word_is_held_back_too(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await with_batch(new_broker, broker_rig, "broker.max_batch_deliveries=3")
    leased = [(await broker.lease_batch(f"learner-{number}", 0)).batch for number in range(2, 6)]
    assert [batch is not None for batch in leased] == [True, True, False, False]
    assert "3 learners that died with it" not in (await broker.why_stalled())[0].reason
    assert "4 learners that died with it" in (await broker.why_stalled())[0].reason
    assert await broker.operations.drop_batch(0) == 8


async def test_a_batch_whose_policy_is_published_is_not_dropped(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await with_batch(new_broker, broker_rig)
    await broker.publish_policy(broker_rig.manifest(1))
    for _ in range(3):
        await broker.operations.report_batch_failure(0, "the disk is full")
    with pytest.raises(Refused, match="published already"):
        await broker.operations.drop_batch(0)


# Modes


async def test_a_paused_run_leases_nothing_takes_what_is_handed_in_and_goes_on(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await opened(new_broker, broker_rig)
    held = (await broker.lease_tasks(GEN, 4, 0)).tasks
    assert await broker.operations.set_mode(RunMode.PAUSED) is RunMode.RUNNING
    assert await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in held]) == []
    assert (await broker.lease_tasks(GEN, 4, 0)).tasks == ()
    assert (await broker.lease_grading(VER, 4, 0)).gradings == ()
    assert (await broker.lease_batch(LEARNER, 0)).batch is None
    status = await broker.status()
    assert (status.mode, status.admission_slots_free) == (RunMode.PAUSED, 0)
    waiting = asyncio.create_task(broker.lease_grading(VER, 4, 30))
    await asyncio.sleep(0.05)
    assert await broker.operations.set_mode(RunMode.RUNNING) is RunMode.PAUSED
    assert len((await asyncio.wait_for(waiting, 60)).gradings) == 4


async def test_a_drained_run_admits_nothing_and_works_on_what_it_has(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await opened(new_broker, broker_rig)
    await broker.lease_tasks(GEN, 4, 0)
    await broker.operations.set_mode(RunMode.DRAINING)
    await broker.release_leases(GEN)
    assert len((await broker.lease_tasks(OTHER, 100, 0)).tasks) == 4, "what was admitted is still leased"
    assert (await broker.status()).ledger.admitted == 4
    await broker.operations.set_mode(RunMode.RUNNING)
    assert len((await broker.lease_tasks(GEN, 100, 0)).tasks) == 12


async def test_a_rollout_that_its_agent_abandoned_is_given_up_and_its_group_goes_on(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.pipeline_k=3")
    held = (await broker.lease_tasks(GEN, 4, 0)).tasks
    mine = [item.lease.lease_id for item in held]
    assert await broker.release_leases(OTHER, mine[:1], abandoned=True) == 0, "another worker holds no such lease"
    assert await broker.release_leases(GEN, mine[:1], abandoned=True) == 1
    assert await broker.release_leases(GEN, mine[:1], abandoned=True) == 0
    status = await broker.status()
    assert (status.ledger.abandoned, status.ledger.in_flight["sampling"]) == (1, 3)
    assert status.ledger.balanced
    assert status.cancelled == {"abandoned": 1}
    assert not await broker.operations.dead_letters()
    await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in held[1:]])
    kinds = iter((VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER, VerdictKind.ACCEPTED))
    await broker_rig.grade(broker, lambda rollout_id: next(kinds))
    assert (await broker.status()).ledger.in_flight["ready"] == 3, "the group is complete without it"
    others = (await broker.lease_tasks(GEN, 4, 0)).tasks
    leases = [item.lease.lease_id for item in others]
    assert len({item.task.group_id for item in others}) == 1
    assert await broker.release_leases(GEN, leases[:3], abandoned=True) == 3
    ledger = (await broker.status()).ledger
    assert (ledger.abandoned, ledger.balanced) == (5, True), "one member is no group"


async def test_a_refused_problem_is_given_up_at_once_and_not_asked_again(
    new_broker: NewBroker, broker_rig: Any
) -> None:
    broker = await opened(new_broker, broker_rig, "broker.pipeline_k=3")
    held = (await broker.lease_tasks(GEN, 8, 0)).tasks
    one, other = held[0].task.problem_id, held[4].task.problem_id
    assert one != other
    mine = [item.lease.lease_id for item in held if item.task.problem_id == one]
    assert await broker.release_leases(OTHER, mine[:1], "too long") == 0, "another worker holds no such lease"
    assert await broker.release_leases(GEN, mine[:1], "a prompt of 900 tokens leaves no room") == 4
    assert await broker.release_leases(GEN, mine[1:], "a prompt of 900 tokens leaves no room") == 0
    status = await broker.status()
    assert (status.refused_problems, status.num_problems, status.ledger.abandoned) == (1, 6, 4)
    assert status.ledger.balanced
    assert "refused: 1 of 6 problems, of which generation can make no rollout, such as: a prompt of 900 tokens" in (
        "\n".join(status_lines(status))
    )
    lost = await broker.heartbeat(GEN, mine[1:2])
    assert list(lost.values()) == [LeaseLoss.REFUSED]
    asked = set()
    for _ in range(8):
        tasks = (await broker.lease_tasks(GEN, 8, 0)).tasks
        asked |= {item.task.problem_id for item in tasks}
        await broker.submit_rollouts(GEN, [broker_rig.sampled(item) for item in tasks])
        await broker_rig.grade(broker, lambda rollout_id: VerdictKind.ACCEPTED)  # all equal: filtered
    assert asked == {problem.problem_id for problem in broker_rig.problems} - {one}


async def test_a_run_of_refused_problems_leases_nothing_and_says_why(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await opened(new_broker, broker_rig, "broker.pipeline_k=3")
    async with asyncio.timeout(60):
        while (tasks := (await broker.lease_tasks(GEN, 8, 0)).tasks) and not (await broker.status()).all_refused:
            await broker.release_leases(GEN, [item.lease.lease_id for item in tasks], "a prompt of 900 tokens")
        assert (await broker.lease_tasks(GEN, 8, 0)).tasks == ()
    status = await broker.status()
    assert status.refused_problems == status.num_problems == 6
    assert status.ledger.balanced
    (blocker,) = await broker.why_stalled()
    assert blocker.cause is StallCause.ALL_REFUSED
    assert "can make no rollout of any of the 6 problems, such as: a prompt of 900 tokens" in blocker.reason


async def test_a_run_that_has_ended_goes_on(new_broker: NewBroker, broker_rig: Any) -> None:
    broker = await opened(new_broker, broker_rig)
    assert not await broker.continue_run(), "it has not ended"
    await broker_rig.sample(broker, 8)
    await broker_rig.grade(broker, broker_rig.mixed)
    leased = await broker.lease_batch(LEARNER, 0)
    assert leased.batch is not None
    await broker.finish_run("pass@1 is high enough")
    assert (await broker.lease_tasks(GEN, 8, 0)).run_finished
    assert "finished: pass@1 is high enough" in status_lines(await broker.status())[0]
    assert await broker.continue_run()
    status = await broker.status()
    assert status.ledger.balanced
    assert (status.finished, status.finish_reason) == (False, "")
    assert len(await broker_rig.sample(broker, 8)) == 8
    await broker_rig.grade(broker, broker_rig.mixed)
    again = await broker.lease_batch(LEARNER, 0)
    assert again.batch is not None
    assert again.batch.batch_id == leased.batch.batch_id, "the batch that was not committed is made anew"
    assert await broker.commit_batch(again.batch.batch_id, 4) is False
