"""Random histories of a run against a real Redis: the broker's laws hold after every step of every history.

Laws: admitted = trained + filtered + stale + abandoned + in flight; rollouts live and not in a batch <= k * B; no
rollout is trained on twice; no token in a batch is older than the policy of staleness allows; the streams hold exactly
the rollouts whose state says so; nothing is kept of a rollout that reached a final state, but the record of a dead
letter.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nouscoder.broker import streams
from nouscoder.broker.core import Broker
from nouscoder.broker.errors import Refused
from nouscoder.domain.batch import EncodedBatch
from nouscoder.domain.lease import LeasedTask, RecordedGrading
from nouscoder.domain.run_status import RunMode
from nouscoder.domain.staleness import StalenessBound, StalePolicy
from nouscoder.domain.verdict import VerdictKind

Answer = TypeVar("Answer")
_G, _B = 4, 8
_KINDS = (VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER, VerdictKind.INTERNAL_ERROR)
_STEPS = (
    *("sample", "grade", "train") * 6,
    *("old", "gen", "ver", "lea", "lea", "broker", "expire", "publish", "release", "leave", "mode", "letters", "drop"),
    "finish",
)
_FATES = ("once", "twice", "keep")
_WANTED = (100, 5, 1)


@dataclass(frozen=True)
class Step:
    """One thing that happens: to which worker, how much it asks for, what it does with it, with which verdicts."""

    what: str
    slot: int
    wanted: int
    fate: str
    kinds: tuple[VerdictKind, ...]
    place: int


_steps = st.builds(
    Step,
    what=st.sampled_from(_STEPS),
    slot=st.integers(0, 1),
    wanted=st.sampled_from(_WANTED),
    fate=st.sampled_from(_FATES),
    kinds=st.lists(st.sampled_from(_KINDS), max_size=4).map(tuple) | st.just((VerdictKind.ACCEPTED,) * 100),
    place=st.integers(0, 10_000),
)


def random_step(source: random.Random) -> Step:
    return Step(
        what=source.choice(_STEPS[:-1]),
        slot=source.randrange(2),
        wanted=source.choice(_WANTED),
        fate=source.choice(_FATES),
        kinds=source.choice([tuple(source.choices(_KINDS, k=source.randrange(5))), (VerdictKind.ACCEPTED,) * 100]),
        place=source.randrange(10_000),
    )


class RunHistory(RuleBasedStateMachine):
    """Two generation workers, two graders, two learners and a broker, each of which may die at any time."""

    rig: Any = None
    k = 2
    policy = StalePolicy.DROP
    max_staleness = 2

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.pids = itertools.count(1)
        self.config = self.rig.config(
            f"broker.pipeline_k={self.k}",
            f"broker.stale_policy={self.policy}",
            f"broker.max_staleness={self.max_staleness}",
            "broker.max_deliveries=3",
            "broker.max_regrades=1",
        )
        self.broker: Broker = self.rig.broker(self.config)
        self.impatient = self.rig.impatient_store(self.broker)
        self.tasks: list[tuple[str, LeasedTask]] = []  # leases ever given, also lost ones: zombies send too
        self.gradings: list[tuple[str, RecordedGrading]] = []
        self.batch: EncodedBatch | None = None
        self.trained: list[str] = []
        self.version = -1
        self.workers = {name: self.incarnation(name) for name in ("gen-0", "gen-1", "ver-0", "ver-1", "lea-0", "lea-1")}
        self.num_committed = 0
        self.finished = False
        self.bound = StalenessBound.of(self.policy, self.k, self.max_staleness)
        self.most_stale = 0

    def incarnation(self, name: str) -> str:
        return f"{name}-{next(self.pids)}"

    def go(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        return self.runner.run(call)

    @initialize()
    def first_policy(self) -> None:
        self.publish()

    @rule(step=_steps)
    def step(self, step: Step) -> None:
        """One rule for everything: with many, Hypothesis turns some off and few histories get as far as a batch."""
        self.do(step)

    def do(self, step: Step) -> None:
        if step.what == "sample":
            self.sample(step.slot, step.wanted, step.fate)
        elif step.what == "grade":
            self.grade(step.slot, step.wanted, step.fate, list(step.kinds))
        elif step.what == "train":
            self.train(step.slot, step.fate)
        elif step.what == "old":
            self.old_leases_are_handed_in(step)
        elif step.what == "finish":
            self.finish()
        else:
            self.disturb(step.slot, step.what)

    def sample(self, slot: int, wanted: int, fate: str) -> None:
        worker = self.workers[f"gen-{slot}"]
        leased = self.go(self.broker.lease_tasks(worker, wanted, 0))
        assert len(leased.tasks) <= wanted
        assert leased.run_finished == self.finished
        self.tasks += [(worker, item) for item in leased.tasks]
        if fate != "keep":
            assert self.hand_in_rollouts(worker, leased.tasks, again=fate == "twice") == []

    def grade(self, slot: int, wanted: int, fate: str, kinds: list[VerdictKind]) -> None:
        worker = self.workers[f"ver-{slot}"]
        leased = self.go(self.broker.lease_grading(worker, wanted, 0))
        assert len(leased.gradings) <= wanted
        self.gradings += [(worker, item) for item in leased.gradings]
        if fate != "keep":
            refused = self.hand_in_verdicts(worker, leased.gradings, kinds, again=fate == "twice")
            assert not refused or VerdictKind.INTERNAL_ERROR in kinds, "only a group that became too small is cancelled"

    def train(self, slot: int, fate: str) -> None:
        leased = self.go(self.broker.lease_batch(self.workers[f"lea-{slot}"], 0))
        assert leased.run_finished == self.finished
        if leased.batch is not None:
            self.check_batch(leased.batch)
            self.batch = leased.batch
        if fate != "keep" and leased.batch is not None:
            self.commit(leased.batch, again=fate == "twice")

    def old_leases_are_handed_in(self, step: Step) -> None:
        """Work under a lease kept, lost or done long ago, by whoever had it."""
        if self.tasks:
            worker, task = self.tasks[step.place % len(self.tasks)]
            self.hand_in_rollouts(worker, [task], again=True)
        if self.gradings:
            worker, grading = self.gradings[step.place % len(self.gradings)]
            self.hand_in_verdicts(worker, [grading], list(step.kinds), again=True)
        if self.batch is not None and step.place % 4 == 0:
            self.commit(self.batch, again=True)

    def disturb(self, slot: int, what: str) -> None:
        if what == "broker":
            self.go(self.broker.store.close())
            self.broker = self.rig.broker(self.config)
        elif what == "expire":
            self.go(streams.sweep(self.impatient))
        elif what == "publish":
            self.publish()
        elif what == "release":
            self.go(self.broker.release_leases(self.workers[f"{('gen', 'ver')[slot]}-{slot}"]))
        elif what == "leave":
            self.agents_leave(self.workers[f"gen-{slot}"])
        elif what == "mode":
            self.leave_and_go_on(RunMode.PAUSED if slot else RunMode.DRAINING)
        elif what == "letters":
            letters = [letter.letter_id for letter in self.go(self.broker.operations.dead_letters())]
            removed, _ = self.go(self.broker.operations.remove_dead_letters(letters, requeue=bool(slot)))
            assert removed == len(letters)
        elif what == "drop":
            self.drop_batch()
        else:
            self.workers[f"{what}-{slot}"] = self.incarnation(f"{what}-{slot}")

    def agents_leave(self, worker: str) -> None:
        """An agent abandons the newest rollout; the ledger counts it once, if the worker still holds it."""
        leases = [item.lease.lease_id for holder, item in self.tasks[-1:] if holder == worker]
        before = self.go(self.broker.status()).ledger.abandoned
        if leases:
            given_up = self.go(self.broker.release_leases(worker, leases, abandoned=True))
            # A group that becomes too small takes the rest of it along.
            assert given_up <= self.go(self.broker.status()).ledger.abandoned - before
            assert self.go(self.broker.release_leases(worker, leases, abandoned=True)) == 0

    def leave_and_go_on(self, mode: RunMode) -> None:
        before = self.go(self.broker.status()).ledger.admitted
        self.go(self.broker.operations.set_mode(mode))
        leased = self.go(self.broker.lease_tasks(self.workers["gen-0"], 100, 0)).tasks
        self.tasks += [(self.workers["gen-0"], item) for item in leased]
        assert mode is RunMode.DRAINING or not leased
        assert self.go(self.broker.status()).ledger.admitted == before
        self.go(self.broker.operations.set_mode(RunMode.RUNNING))

    def drop_batch(self) -> None:
        """A batch that fails three times is held back and dropped, unless its policy is published."""
        if self.batch is None or self.finished:
            return
        number = self.batch.batch_id
        for _ in range(3):
            self.go(self.broker.operations.report_batch_failure(number, "loss is NaN"))
        assert self.go(self.broker.lease_batch(self.workers["lea-0"], 0)).batch is None
        if self.version > number:
            with pytest.raises(Refused, match="published already"):
                self.go(self.broker.operations.drop_batch(number))
            self.commit(self.batch, again=False)
        else:
            assert self.go(self.broker.operations.drop_batch(number)) == len(self.batch.rollouts)
            self.batch = None

    def publish(self) -> None:
        """The next policy. `finish_first` promises something only while each policy is made by a batch."""
        num_made = self.num_committed + (self.batch is not None)
        if self.policy is StalePolicy.FINISH_FIRST and self.version >= num_made:
            return
        self.version += 1
        self.go(self.broker.publish_policy(self.rig.manifest(self.version)))

    def hand_in_rollouts(self, worker: str, tasks: Sequence[LeasedTask], again: bool) -> list[str]:
        pairs = [self.rig.sampled(item, self.version) for item in tasks]
        refused = self.go(self.broker.submit_rollouts(worker, pairs))
        if again:
            before = self.go(self.broker.status())
            assert self.go(self.broker.submit_rollouts(worker, pairs)) == refused
            assert self.go(self.broker.status()) == before
        return refused

    def hand_in_verdicts(
        self, worker: str, gradings: Sequence[RecordedGrading], kinds: list[VerdictKind], again: bool
    ) -> list[str]:
        """Half accepted where `kinds` says nothing."""
        verdicts = [self.rig.verdict(self.rig.mixed(grading.rollout_id)) for grading in gradings]
        verdicts[: len(kinds)] = [self.rig.verdict(kind) for kind in kinds[: len(verdicts)]]
        items = [
            (item.lease.lease_id, item.rollout_id, verdict) for item, verdict in zip(gradings, verdicts, strict=True)
        ]
        refused = self.go(self.broker.submit_verdicts(worker, items))
        if again:
            before = self.go(self.broker.status())
            self.go(self.broker.submit_verdicts(worker, items))
            assert self.go(self.broker.status()) == before
        return refused

    def check_batch(self, batch: EncodedBatch) -> None:
        assert self.batch is None or batch == self.batch, "an uncommitted batch changed"
        assert batch.batch_id == self.num_committed
        assert len(batch.rollouts) <= _B
        assert len(self.rig.groups(batch)) == _B // _G
        for recorded in self.rig.read(batch).rollouts:
            staleness = batch.policy_version - recorded.header.oldest_version
            assert 0 <= staleness <= self.bound.max_age, "the bound of staleness"
            self.most_stale = max(self.most_stale, staleness)

    def commit(self, batch: EncodedBatch, again: bool) -> None:
        self.batch = None
        if self.finished:
            with pytest.raises(Refused):
                self.go(self.broker.commit_batch(batch.batch_id, batch.batch_id + 1))
            return
        assert self.go(self.broker.commit_batch(batch.batch_id, batch.batch_id + 1)) is False
        self.num_committed += 1
        self.trained += [graded.header.rollout_id for graded in self.rig.read(batch).rollouts]
        if again:
            assert self.go(self.broker.commit_batch(batch.batch_id, batch.batch_id + 1)) is True

    def finish(self) -> None:
        if self.num_committed < 3:
            return
        first = self.go(self.broker.finish_run("enough"))
        assert sum(first.in_flight.values()) == 0
        assert self.go(self.broker.finish_run("again")) == first
        self.finished = True

    @invariant()
    def the_laws_hold(self) -> None:
        status = self.go(self.broker.status())
        ledger = status.ledger
        assert ledger.balanced, ledger
        unbatched = sum(count for state, count in ledger.in_flight.items() if state != "training")
        assert unbatched <= self.bound.pipeline_k * _B
        assert ledger.trained == len(self.trained)
        assert len(set(self.trained)) == len(self.trained), "trained twice"
        by_name = {stream.stream: stream for stream in status.streams}
        assert (by_name["tasks"].lag, by_name["tasks"].pending) == (
            ledger.in_flight["queued"],
            ledger.in_flight["sampling"],
        )
        assert (by_name["grading"].lag, by_name["grading"].pending) == (
            ledger.in_flight["sampled"],
            ledger.in_flight["grading"],
        )
        hashes, records = self.go(self._kept())
        assert hashes == sum(ledger.in_flight.values()), "a hash outlives its rollout"
        sampled = sum(ledger.in_flight.values()) - ledger.in_flight["queued"] - ledger.in_flight["sampling"]
        letters = self.go(self.broker.operations.dead_letters())
        assert records == sampled + sum(bool(letter.record) for letter in letters), (
            "each sampled rollout in flight and each dead letter of one has a record, and no other record stays"
        )

    async def _kept(self) -> tuple[int, int]:
        """Rollouts that have a hash, and records, after the janitor came by."""
        await self.broker.records.delete_garbage()
        store = self.broker.store
        keys = [key async for key in store.redis.scan_iter(store.prefix.replace("[", "\\[") + "*", count=1000)]
        prefix = store.prefix.encode()
        hashes, records = (sum(key.startswith(prefix + kind) for key in keys) for kind in (b"rollout:", b"record:"))
        return hashes, records

    def teardown(self) -> None:
        async def drop() -> None:
            keys = await self.broker.store.redis.keys(self.broker.store.prefix + "*")
            await self.broker.store.redis.delete(*keys)
            await self.broker.store.close()
            await self.impatient.close()

        self.go(drop())
        self.runner.close()


@pytest.mark.timeout(300)
def test_the_laws_hold_after_every_step_of_random_histories(broker_rig: Any) -> None:
    machine = type("RunHistoryOnRig", (RunHistory,), {"rig": broker_rig})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            database=None,
        ),
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("k", "seed"), [(2, 1), *(pytest.param(*one, marks=pytest.mark.heavy) for one in ((1, 3), (3, 2)))]
)
def test_the_laws_hold_in_long_histories_that_meet_every_end(broker_rig: Any, k: int, seed: int) -> None:
    history = type("RunHistoryOnRig", (RunHistory,), {"rig": broker_rig, "k": k})()
    source = random.Random(seed)
    try:
        history.publish()
        for _ in range(1200):
            history.do(random_step(source))
            history.the_laws_hold()
        status = history.go(history.broker.status())
        ledger = status.ledger
        assert min(ledger.trained, ledger.filtered, ledger.stale, ledger.abandoned) > 0, ledger
        assert all(stream.redeliveries > 0 for stream in status.streams[:2]), status.streams
        assert sum(stream.dead_letters for stream in status.streams) > 0
        assert {"stale", "too_small", "abandoned"} <= status.cancelled.keys(), status.cancelled
    finally:
        history.teardown()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("policy", "k", "max_staleness"), [(StalePolicy.KEEP, 2, 3), (StalePolicy.FINISH_FIRST, 3, 1)])
def test_the_laws_hold_under_the_other_policies_of_staleness(
    broker_rig: Any, policy: StalePolicy, k: int, max_staleness: int
) -> None:
    """`keep` trains on groups older than k - 1 versions; under `finish_first` no group is ever stale."""
    settings = {"rig": broker_rig, "k": k, "policy": policy, "max_staleness": max_staleness}
    history = type("RunHistoryOnRig", (RunHistory,), settings)()
    source = random.Random(0)
    try:
        history.publish()
        for _ in range(350):
            history.do(random_step(source))
            history.the_laws_hold()
        ledger = history.go(history.broker.status()).ledger
        assert ledger.trained > 0
        if policy is StalePolicy.KEEP:
            assert history.most_stale > k - 1
        else:
            assert ledger.stale == 0
    finally:
        history.teardown()
