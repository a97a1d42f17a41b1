"""`nouscoder bench chaos`: which faults come, how the learner's books are read, and a real run that is disturbed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from nouscoder.bench.chaos import ChaosResult, as_text, bench_chaos
from nouscoder.bench.chaos_faults import FAULTS, choose
from nouscoder.bench.chaos_run import trained_rollouts
from nouscoder.domain.batch import RecordedBatch, RecordedRollout
from nouscoder.learner.saved_batches import SavedBatches
from nouscoder.learner.synthetic import random_batch
from nouscoder.store.rollout_record import encode_rollout

GOOD = ChaosResult(
    seed=3,
    chaos_s=60.0,
    num_cores=2,
    load_average=1.5,
    faults={"kill broker": 2, "redis wiped": 1},
    steps=9,
    batches=9,
    rollouts_trained=72,
    trained_twice=0,
    rollouts_lost=5,
    num_statuses=40,
    balanced=True,
    ended=True,
)


def drawn(seed: int, number: int) -> list[str]:
    source = random.Random(seed)
    return [choose(source).name for _ in range(number)]


def test_a_seed_decides_the_faults_and_each_fault_comes() -> None:
    assert drawn(1, 20) == drawn(1, 20) != drawn(2, 20)
    assert set(drawn(0, 2000)) == {fault.name for fault in FAULTS}


@pytest.mark.parametrize(
    "broken", [replace(GOOD, trained_twice=1), replace(GOOD, balanced=False), replace(GOOD, ended=False)]
)
def test_a_run_that_breaks_one_promise_is_not_good(broken: ChaosResult) -> None:
    assert GOOD.is_good
    assert not broken.is_good


def test_the_text_has_every_figure() -> None:
    text = as_text(replace(GOOD, trained_twice=4))
    assert "3 faults: 2 x kill broker, 1 x redis wiped" in text
    assert "9 steps, 9 batches, 72 rollouts trained, 4 of them twice" in text
    assert "5 rollouts lost; 40 statuses, balanced: yes; the run ended: yes" in text


async def test_a_rollout_in_two_saved_batches_counts_as_trained_twice(tmp_path: Path) -> None:
    saved = SavedBatches(tmp_path, keep=10)
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
    assert Counter(trained_rollouts(tmp_path).values()) == {1: 12, 2: 4}


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_a_minute_of_chaos_leaves_a_run_that_goes_on() -> None:
    result = await bench_chaos(1.0, 0, print)
    print(as_text(result))
    assert result.is_good
    assert sum(result.faults.values()) >= 4
