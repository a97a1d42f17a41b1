"""Learners of several ranks, of which one is killed at a point of a step.

The script reads lines `["what", "folder", size]` as learner_rank.py does. What is `run`, or `RANK@POINT`: the run in
which that rank kills itself with SIGKILL at the point of the third batch that POINTS names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import learner_rank  # type: ignore[import-not-found]

from nouscoder.domain.batch import Batch
from nouscoder.learner.metrics.step import TrainedBatch
from nouscoder.learner.trainer import Trainer

DEADLY_BATCH = 2
# For each point: a method of the trainer, or of its optimizer, which call of the batch, and before or after it.
POINTS: dict[str, tuple[str, int, bool]] = {
    "before the batch is packed": ("_pack", 1, True),
    "before the first step": ("_take_step", 1, True),
    "before the forward pass": ("_loss_inputs", 1, True),
    "before the backward pass": ("_backward", 1, True),
    "before the norm of the gradient": ("_clip_gradient", 1, True),
    "before the optimizer": ("optimizer.step", 1, True),
    "after the optimizer": ("optimizer.step", 1, False),
    "between two steps": ("_take_step", 2, True),
}


def dying(real: Callable[..., Any], call: int, before: bool) -> Callable[..., Any]:
    """`real`, which kills this process before or after its `call`th call."""
    calls = 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and before:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*arguments, **more)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return counted


def arm(point: str) -> None:
    """Make trainers of this process die at the point."""
    name, call, before = POINTS[point]
    real = Trainer.train_batch

    def train_batch(self: Trainer, batch: Batch, replayed: Sequence[Batch] = ()) -> TrainedBatch:
        if batch.batch_id == DEADLY_BATCH:
            owner: Any = self.optimizer if name.startswith("optimizer.") else self
            method = name.removeprefix("optimizer.")
            setattr(owner, method, dying(getattr(owner, method), call, before))
        return real(self, batch, replayed)

    Trainer.train_batch = train_batch  # type: ignore[method-assign]


real_main = learner_rank.main


def main(what: str, folder: Path) -> None:
    """A rank of a run, which may be the one that dies."""
    rank, _, point = what.partition("@")
    if point and rank == os.environ["RANK"]:
        arm(point)
    real_main("run", folder)


learner_rank.main = main

if __name__ == "__main__":
    for line in sys.stdin:
        asked, place, count = json.loads(line)
        print(json.dumps(learner_rank.start(asked, Path(place), count)), flush=True)
