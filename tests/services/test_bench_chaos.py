"""`nouscoder bench chaos`: how faults are caused, what the result promises, and a real run that is disturbed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nouscoder.bench.chaos import ChaosResult, Trained, as_text, bench_chaos, read_trained
from nouscoder.bench.chaos_plan import KINDS_AND_TARGETS, REDIS, FaultKind, PlannedFault, Strike
from nouscoder.bench.chaos_run import cause
from nouscoder.domain.batch import RecordedBatch, RecordedRollout
from nouscoder.learner.model.synthetic import random_batch
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.run.supervisor import ProcessState
from nouscoder.store.rollout_record import encode_rollout

GOOD = ChaosResult(
    seed=3,
    chaos_s=60.0,
    num_cores=2,
    load_average=1.5,
    faults={"kill broker": 2, "wipe redis": 1},
    num_pairs=1,
    num_forgettings=1,
    trained=Trained(steps=9, in_order=True, longest_gap_s=12.5, rollouts=72, rollouts_twice=0),
    rollouts_committed=72,
    rollouts_lost=5,
    num_statuses=40,
    num_unbalanced=0,
    ended=True,
)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (replace(GOOD, trained=replace(GOOD.trained, rollouts_twice=4)), "4 rollouts were trained on twice"),
        (replace(GOOD, trained=replace(GOOD.trained, in_order=False)), "a step is missing, or came twice"),
        (replace(GOOD, rollouts_committed=64), "the broker counts 64 trained rollouts, the learner 72"),
        (replace(GOOD, num_unbalanced=1), "1 of 40 statuses do not balance"),
        (replace(GOOD, ended=False), "the run did not end"),
    ],
)
def test_each_broken_promise_is_a_complaint(broken: ChaosResult, complaint: str) -> None:
    assert GOOD.complaints == []
    assert broken.complaints == [complaint]
    assert f"BROKEN: {complaint}" in as_text(broken)


def test_the_text_has_every_figure() -> None:
    text = as_text(GOOD)
    assert "3 faults, 1 times two at once: 2 x kill broker, 1 x wipe redis" in text
    assert "9 steps, each once and in order: yes; the longest gap between two: 12.5 s" in text
    assert "72 rollouts trained, 0 of them twice" in text
    assert "Redis forgot writes 1 times; 5 rollouts are counted as lost" in text
    assert "40 statuses, 0 unbalanced; the run ended: yes" in text


async def test_the_learners_books_show_a_rollout_in_two_batches_and_a_missing_step(tmp_path: Path) -> None:
    saved = SavedBatches(tmp_path / "batches", keep=10)
    (tmp_path / "batches").mkdir(exist_ok=True)
    rollouts = random_batch(0, seed=0).rollouts
    for batch_id, members in enumerate((rollouts, rollouts[:4])):
        encoded = [encode_rollout(graded.rollout) for graded in members]

        async def records(pieces: list[bytes]) -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        recorded = [
            RecordedRollout(header, graded.verdict, graded.reward, "")
            for graded, (header, _) in zip(members, encoded, strict=True)
        ]
        await saved.save(RecordedBatch(batch_id, tuple(recorded), 0), records([record for _, record in encoded]))
    lines = [{"step": step, "time": time} for step, time in ((1, 10.0), (2, 11.0), (4, 15.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = Trained(steps=3, in_order=False, longest_gap_s=4.5, rollouts=len(rollouts), rollouts_twice=4)
    assert read_trained(tmp_path, num_batches=1) == expected


class FakeRun:
    """Notes what is done to it, in order. `pid` of each service never changes."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.redis_turn = asyncio.Lock()
        self.redis = self.clock = self
        self.services = dict.fromkeys(("broker", "verifier", "generation", "learner"), self)
        self.state = ProcessState.RUNNING

    def __getattr__(self, name: str) -> Any:
        def act(*arguments: Any) -> FakeRun:
            self.done.append(" ".join([name, *(getattr(value, "name", str(value)) for value in arguments)]))
            return self

        return act

    async def __aenter__(self) -> None:
        self.done.append("twin lives")

    async def __aexit__(self, *_: object) -> None:
        self.done.append("twin dies")


EXPECTED = {
    FaultKind.KILL: ["signal_group SIGKILL"],
    FaultKind.STOP: ["signal_group SIGSTOP", "signal_group SIGCONT"],
    FaultKind.TWIN: ["twin_of broker", "twin lives", "twin dies"],
    FaultKind.SET_CLOCK: ["step 0.01"],
}
EXPECTED_OF_REDIS = {
    FaultKind.KILL: ["die", "come_back"],
    FaultKind.STOP: ["stop", "go_on"],
    FaultKind.FILL: ["fill", "empty"],
    FaultKind.ROLL_BACK: ["remember", "roll_back"],
    FaultKind.WIPE: ["wipe"],
}


@pytest.mark.parametrize(("kind", "target"), KINDS_AND_TARGETS)
async def test_each_fault_is_caused_and_undone(kind: FaultKind, target: str) -> None:
    run: Any = FakeRun()
    await cause(run, Strike(0.0, (PlannedFault(kind, target, 0.01),)))
    expected = (EXPECTED_OF_REDIS if target == REDIS else EXPECTED)[kind]
    assert run.done == [action.replace("broker", target) for action in expected]


async def test_faults_of_redis_wait_for_each_other_and_a_cancelled_one_is_undone() -> None:
    run: Any = FakeRun()
    full = asyncio.ensure_future(cause(run, Strike(0.0, (PlannedFault(FaultKind.FILL, REDIS, 3600.0),))))
    wiped = asyncio.ensure_future(cause(run, Strike(0.0, (PlannedFault(FaultKind.WIPE, REDIS),))))
    while run.done != ["fill"]:
        await asyncio.sleep(0.01)
    assert not wiped.done()
    full.cancel()
    await wiped
    assert run.done == ["fill", "empty", "wipe"]


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_two_minutes_of_chaos_leave_a_run_that_goes_on() -> None:
    result = await bench_chaos(2.0, 0, print)
    print(as_text(result))
    assert result.complaints == []
    assert result.num_forgettings >= 4
