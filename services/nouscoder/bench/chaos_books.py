"""Reads what a learner trained from its run folder: its own books."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

from nouscoder.bench.chaos_result import Trained
from nouscoder.learner.state.saved_batches import SavedBatches

_EVERY_BATCH = 1_000_000


def read_books(folder: Path, num_batches: int) -> Trained:
    """What a learner that committed so many batches trained. Raises SavedBatchError, OSError."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf8").splitlines()]
    gaps_s = [after["time"] - before["time"] for before, after in pairwise(lines)]
    batches = _rollouts_of_batches(folder / "batches")
    times = Counter(name for names in batches.values() for name in names)
    return Trained(
        steps=len(lines),
        in_order=[line["step"] for line in lines] == [*range(1, len(lines) + 1)],
        longest_gap_s=round(max(gaps_s, default=0.0), 1),
        rollouts=sum(len(names) for number, names in batches.items() if number < num_batches),
        rollouts_twice=sum(number > 1 for number in times.values()),
    )


def _rollouts_of_batches(folder: Path) -> dict[int, list[str]]:
    """The rollouts of each saved batch. The learner saves a batch, then trains on it once."""
    saved = SavedBatches(folder, _EVERY_BATCH)
    return {number: [one.rollout.rollout_id for one in saved.load(number).rollouts] for number in saved.numbers()}
