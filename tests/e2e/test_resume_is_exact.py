"""A run that is killed and resumed has the same losses as an uninterrupted one, with a policy that learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nouscoder.config import Config, load_config

NUM_BATCHES = 6
LEARNING = (
    "demo.train_problems=400",
    "demo.warm_start_share=0.5",
    f"run.total_batches={NUM_BATCHES}",
    "broker.group_size=8",
    "broker.batch_size=32",
    "broker.drop_zero_variance=true",
    "generation.sampling.max_new_tokens=72",
    "learner.keep_checkpoints=100",
    "learner.keep_batches=100",
)


def uninterrupted_losses(config: Config) -> list[float]:
    """The losses of one learner in memory that trains all saved batches in order, one loss per step."""
    from nouscoder.learner.core import RunFiles, prepare_thread
    from nouscoder.learner.saved_batches import SavedBatches
    from nouscoder.learner.trainer import Trainer
    from nouscoder.learner.weights import load_model

    files = RunFiles.of(config)
    prepare_thread(config.learner.threads)
    trainer = Trainer(load_model(files.policy), config)
    batches = SavedBatches(files.batches, config.learner.keep_batches)
    return [step.loss for number in range(NUM_BATCHES) for step in trainer.train_batch(batches.load(number)).steps]


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(loop_run: Callable[..., Any]) -> None:
    run = loop_run(*LEARNING)
    run.start()
    run.until(lambda: len(run.steps()) >= 4, "step 4", 800)
    run.kill_tree()
    run.wait_until_gone()
    killed_after = len(run.steps())
    run.start(resume=True)
    assert run.wait(800) == 0, run.text()[-3000:]
    lines = run.steps()
    assert [line["step"] for line in lines] == list(range(1, 2 * NUM_BATCHES + 1))
    logged = [line["loss"] for line in lines]
    expected = uninterrupted_losses(load_config(run.folder / "config.toml"))
    print(f"killed after step {killed_after}; losses logged {logged}; uninterrupted {expected}")
    assert any(loss != 0 for loss in logged[killed_after:])
    assert logged == expected
    assert trained_once(run.folder)


def trained_once(folder: Path) -> bool:
    """Whether the ledger counts every rollout of the run's batches once."""
    summary = json.loads((folder / "summary.json").read_text())
    return bool(summary["balanced"] and summary["ledger"]["trained"] == NUM_BATCHES * 32)
