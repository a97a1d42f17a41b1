"""Why-stalled on staged runs: each stall has its one cause, and a run that moves has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nouscoder.domain.run_status import Ledger, RunMode, RunStatus, StreamStatus
from nouscoder.domain.stall import HeldBatch, Holder, StallCause, StallSnapshot, Totals, judge

GEN, VER, LEARNER = "generation-h-0-1", "verifier-h-0-1", "learner-1"


def holders(count: int, worker: str, held_s: float = 5.0, silent_s: float = 1.0, still_s: float = 1.0) -> Any:
    return tuple(Holder(f"g000{n // 4:03}-{n % 4}", worker, held_s, silent_s, still_s) for n in range(count))


def status(queued: int = 0, sampled: int = 0, slots: int = 0, **changes: Any) -> RunStatus:
    streams = (
        StreamStatus("tasks", queued, 0, 0, 0),
        StreamStatus("grading", sampled, 0, 0, 0),
        StreamStatus("batches", 0, 0, 0, 0),
    )
    ledger = Ledger(0, 0, 0, 0, 0, {})
    return replace(RunStatus("run", ledger, streams, 9, 18, 9, slots, False, 0, 0), **changes)


# Everything has stood for ten minutes, where a batch takes 30 s; all workers ask for work, and nobody holds any.
LATE = StallSnapshot(
    status=status(),
    since_commit_s=600.0,
    usual_batch_s=30.0,
    since=Totals(),
    sampling=(),
    grading=(),
    batch=None,
    ready_groups=0,
    asked_s={"tasks": 0.2, "grading": 0.2, "batches": 0.2},
    num_problems=100,
    lease_s=10.0,
    batch_lease_s=60.0,
    batch_groups=8,
    group_size=4,
)
HEALTHY = replace(LATE, since_commit_s=20.0, sampling=holders(16, GEN), grading=holders(4, VER))


def stand(worker: str, *, silent: bool = False, paused: bool = False) -> Any:
    found = holders(16, worker, held_s=580.0, silent_s=560.0 if silent else 1.0, still_s=580.0)
    return tuple(replace(holder, paused=paused) for holder in found)


def asked(**seconds: float | None) -> dict[str, float]:
    return {name: value for name, value in {**LATE.asked_s, **seconds}.items() if value is not None}


CAUSE = StallCause
STALLS: dict[str, tuple[StallSnapshot, StallCause, str]] = {
    "the engine is paused": (
        replace(LATE, sampling=stand(GEN, paused=True)),
        CAUSE.ENGINE_PAUSED,
        "a person paused the engine",
    ),
    "the engine hangs": (
        replace(LATE, sampling=stand(GEN), status=status(queued=4)),
        CAUSE.ENGINE_HUNG,
        f"16 rollouts are being sampled by {GEN} and have not moved for up to 580 s",
    ),
    "generation is dead, its leases are not swept yet": (
        replace(LATE, sampling=stand(GEN, silent=True), asked_s=asked(tasks=570.0)),
        CAUSE.GENERATION_SILENT,
        "no heartbeats",
    ),
    "generation is dead, its rollouts wait": (
        replace(LATE, status=status(queued=16), asked_s=asked(tasks=570.0)),
        CAUSE.GENERATION_ABSENT,
        "16 rollouts could be sampled and nobody has asked for 570 s",
    ),
    "generation never started": (
        replace(LATE, status=status(slots=64), asked_s=asked(tasks=None)),
        CAUSE.GENERATION_ABSENT,
        "nobody has ever asked",
    ),
    "the verifier hangs": (
        replace(LATE, grading=stand(VER), status=status(sampled=40)),
        CAUSE.VERIFIER_HUNG,
        f"16 rollouts are being graded by {VER}",
    ),
    "the verifier is dead, its leases are not swept yet": (
        replace(LATE, grading=stand(VER, silent=True)),
        CAUSE.VERIFIER_SILENT,
        "no heartbeats",
    ),
    "the verifier never started": (
        replace(LATE, status=status(sampled=64), asked_s=asked(grading=None)),
        CAUSE.VERIFIER_ABSENT,
        "64 rollouts wait for grading and nobody has ever asked",
    ),
    "the verifier is dead while sampling goes on": (
        replace(LATE, status=status(sampled=64), asked_s=asked(grading=300.0), sampling=holders(16, GEN)),
        CAUSE.VERIFIER_ABSENT,
        "nobody has asked for 300 s",
    ),
    "the learner is dead and holds a batch": (
        replace(LATE, batch=HeldBatch(9, LEARNER, held_s=580.0, silent_s=575.0)),
        CAUSE.LEARNER_SILENT,
        "no heartbeat for 575 s",
    ),
    "the learner is dead and a batch waits": (
        replace(LATE, ready_groups=17, asked_s=asked(batches=590.0)),
        CAUSE.LEARNER_ABSENT,
        "2 batches wait for training",
    ),
    "the learner never started": (
        replace(
            LATE, ready_groups=8, asked_s=asked(batches=None), usual_batch_s=0.0, status=status(batches_committed=0)
        ),
        CAUSE.LEARNER_ABSENT,
        "No batch has been committed yet, 600 s after the first rollout was admitted.",
    ),
    "the learner hangs in a batch": (
        replace(LATE, since_commit_s=3600.0, batch=HeldBatch(9, LEARNER, held_s=3590.0, silent_s=5.0)),
        CAUSE.LEARNER_SLOW,
        "that learner is alive",
    ),
    "the learner crashes again and again": (
        replace(LATE, batch=HeldBatch(9, LEARNER, held_s=4.0, silent_s=1.0, delivery=7, failure="loss is NaN")),
        CAUSE.LEARNER_CRASHES,
        "leased to 7 learner processes, and none has committed it, last with: loss is NaN",
    ),
    "a batch is held back": (
        replace(LATE, batch=HeldBatch(9, LEARNER, 60.0, 60.0, 3, failures=3, failure="loss is NaN", held_back=True)),
        CAUSE.BATCH_HELD_BACK,
        "`nouscoder batch drop 9` abandons its rollouts",
    ),
    "a batch is held back after deaths without a report": (
        replace(LATE, since_commit_s=1.0, batch=HeldBatch(9, LEARNER, 60.0, 60.0, 21, held_back=True)),
        CAUSE.BATCH_HELD_BACK,
        "21 learners that died with it",
    ),
    "the curriculum is empty": (
        replace(LATE, num_problems=0, status=status(slots=64)),
        CAUSE.EMPTY_CURRICULUM,
        "no problem left",
    ),
    "all problems are retired for good": (
        replace(HEALTHY, status=replace(status(slots=64), num_problems=3, all_retired=True)),
        CAUSE.EMPTY_CURRICULUM,
        "no problem left to sample",
    ),
    "generation refuses all problems": (
        replace(
            HEALTHY,
            status=replace(status(), num_problems=3, refused_problems=3, refused_reason="a prompt of 900 tokens"),
        ),
        CAUSE.ALL_REFUSED,
        "no rollout of any of the 3 problems, such as: a prompt of 900 tokens",
    ),
    "Redis is full": (replace(LATE, redis_faults=(CAUSE.REDIS_FULL,)), CAUSE.REDIS_FULL, "raise maxmemory"),
    "Redis is nearly full": (
        replace(HEALTHY, status=status(back_pressure="Redis uses 95 of its 100 MiB: no rollout is taken")),
        CAUSE.REDIS_FULL,
        "no rollout is taken",
    ),
    "Redis cannot write its file": (
        replace(HEALTHY, redis_faults=(CAUSE.REDIS_CANNOT_SAVE,)),
        CAUSE.REDIS_CANNOT_SAVE,
        "its disk",
    ),
    "Redis is a replica": (replace(HEALTHY, redis_faults=(CAUSE.REDIS_READ_ONLY,)), CAUSE.REDIS_READ_ONLY, "a replica"),
    "admission is closed: policies are not published": (
        replace(LATE, status=status(policy_version=7), ready_groups=3),
        CAUSE.ADMISSION_CLOSED,
        "2 trained batches have no published policy",
    ),
    "the run is paused": (replace(LATE, status=status(mode=RunMode.PAUSED)), CAUSE.PAUSED, "`nouscoder resume`"),
    "the run is drained": (replace(LATE, status=status(mode=RunMode.DRAINING)), CAUSE.DRAINING, "`nouscoder resume`"),
    "there is no policy": (replace(LATE, status=status(policy_version=None)), CAUSE.NO_POLICY, "version 0"),
    "all groups are filtered, too hard": (
        replace(LATE, since=Totals(filtered=400, graded=400), sampling=holders(16, GEN), grading=holders(8, VER)),
        CAUSE.ALL_FILTERED,
        "0% of the graded ones were accepted. The problems are too hard",
    ),
    "all groups are filtered, too easy": (
        replace(LATE, since=Totals(filtered=400, graded=420, accepted=420), sampling=holders(16, GEN)),
        CAUSE.ALL_FILTERED,
        "too easy",
    ),
    "all groups are stale": (
        replace(LATE, since=Totals(stale=400, graded=420, accepted=200), sampling=holders(16, GEN)),
        CAUSE.ALL_STALE,
        "broker.max_staleness",
    ),
    "all verdicts are internal_error": (
        replace(
            LATE, since=Totals(internal_errors=1536, abandoned=384), grading=holders(8, VER), sampling=holders(8, GEN)
        ),
        CAUSE.INTERNAL_ERRORS,
        "Grading failed 1536 times",
    ),
    "all rollouts are given up": (
        replace(LATE, since=Totals(abandoned=64), sampling=holders(16, GEN)),
        CAUSE.ALL_GIVEN_UP,
        "leases were lost too often",
    ),
    "every lease fails": (replace(LATE, status=status(queued=16)), CAUSE.LEASES_FAIL, "ask for work get none"),
    "agents have gone with the rollouts that the next batch waits for": (
        replace(LATE, ready_groups=9, sampling=holders(16, GEN), agent_session_s=120),
        CAUSE.AGENTS_SLOW,
        "16 rollouts wait for an agent, or for the next request of theirs",
    ),
    "a hung engine holds the group that the next batch waits for": (
        replace(LATE, ready_groups=9, sampling=(*stand(GEN)[:1], *holders(8, "generation-h-1-1"))),
        CAUSE.ENGINE_HUNG,
        "1 rollouts are being sampled by generation-h-0-1",
    ),
}

HEALTHY_RUNS = {
    "batches come": HEALTHY,
    "long rollouts before the first batch": replace(
        LATE,
        since_commit_s=5000.0,
        usual_batch_s=0.0,
        sampling=holders(256, GEN, held_s=4990.0),
        status=status(batches_committed=0),
    ),
    "long rollouts after a batch": replace(LATE, since_commit_s=4000.0, sampling=holders(256, GEN, held_s=3990.0)),
    "long rollouts, and most wait for a place": replace(
        LATE, sampling=holders(64, GEN, held_s=590.0), status=status(queued=192)
    ),
    "a long batch in training": replace(LATE, batch=HeldBatch(9, LEARNER, held_s=550.0, silent_s=10.0)),
    "one worker of many hangs": replace(LATE, sampling=(*stand(GEN), *holders(16, "generation-h-1-1"))),
    "one worker hangs while batches come": replace(HEALTHY, sampling=stand(GEN)),
    "one group of many is filtered": replace(LATE, since=Totals(filtered=8, graded=90), grading=holders(4, VER)),
    "some internal errors": replace(LATE, since=Totals(internal_errors=6, graded=90), grading=holders(4, VER)),
    "a slow grading of long tests": replace(LATE, grading=holders(8, VER, held_s=590.0, still_s=50.0)),
    "the learner was restarted twice": replace(
        LATE, batch=HeldBatch(9, LEARNER, held_s=10.0, silent_s=2.0, delivery=3), since_commit_s=40.0
    ),
    "the run is finished": replace(LATE, status=status(finished=True)),
}


def test_there_are_at_least_twenty_staged_stalls_and_each_cause_is_among_them() -> None:
    assert len(STALLS) >= 20
    assert {cause for _, cause, _ in STALLS.values()} == set(StallCause)


@pytest.mark.parametrize("name", STALLS)
def test_a_staged_stall_is_named_by_its_cause(name: str) -> None:
    snapshot, cause, words = STALLS[name]
    blockers = judge(snapshot)
    assert [blocker.cause for blocker in blockers] == [cause], blockers
    assert words in blockers[0].reason
    assert blockers[0].reason.startswith("No batch has been committed")


@pytest.mark.parametrize("name", HEALTHY_RUNS)
def test_a_run_that_moves_is_not_stalled(name: str) -> None:
    assert judge(HEALTHY_RUNS[name]) == ()


def test_a_cause_is_named_once_for_any_number_of_rollouts() -> None:
    many = replace(LATE, sampling=(*stand(GEN), *stand("generation-h-1-1")), grading=stand(VER))
    blockers = judge(many)
    assert [(b.cause, b.num_items) for b in blockers] == [(CAUSE.VERIFIER_HUNG, 16), (CAUSE.ENGINE_HUNG, 32)]
    assert "and 1 more" in blockers[1].reason
    assert (blockers[1].item_id, blockers[1].idle_s) == ("g000000-0", 580.0)
