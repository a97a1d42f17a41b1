"""`nouscoder demo` with its defaults: the policy learns and the ledger balances, also when the run is killed once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nouscoder.config import Config, load_config

pytestmark = pytest.mark.alone

MIN_GAIN = 0.30
# Batches that are trained on again in memory; the run is killed among them.
NUM_COMPARED = 8
STEPS_PER_BATCH = 2


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_pass_at_1_rises_by_at_least_0_3(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-m", "nouscoder", "demo", "--seed", str(seed), "--set", f'run.root="{tmp_path}"']
    run = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert_learned(tmp_path / f"demo-{seed}", run.stdout)


@pytest.mark.heavy
@pytest.mark.timeout(2400)
def test_a_killed_and_resumed_demo_learns_and_has_the_losses_of_an_uninterrupted_learner(
    loop_run: Callable[..., Any],
) -> None:
    run = loop_run("learner.keep_batches=1000", defaults=())
    run.start()
    run.until(lambda: len(run.steps()) >= NUM_COMPARED, f"step {NUM_COMPARED}", 900)
    run.kill_tree()
    run.wait_until_gone()
    killed_after = len(run.steps())
    run.start(resume=True)
    assert run.wait(1200) == 0, run.text()[-3000:]

    assert_learned(run.folder, run.text())
    lines = run.steps()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    logged = [line["loss"] for line in lines[: NUM_COMPARED * STEPS_PER_BATCH]]
    expected = uninterrupted_losses(load_config(run.folder / "config.toml"))
    print(f"killed after step {killed_after}; losses logged {logged}; uninterrupted {expected}")
    assert any(loss != 0 for loss in logged[killed_after:])
    assert logged == expected


def assert_learned(folder: Path, printed: str) -> None:
    """Check the gain of held-out pass@1, and that the ledger always balanced and counts each trained rollout once."""
    summary = json.loads((folder / "summary.json").read_text())
    print(json.dumps(summary))
    assert summary["pass_at_1_after"] - summary["pass_at_1_before"] >= MIN_GAIN
    assert summary["balanced"] is True
    assert "balanced yes" in printed
    assert "balanced NO" not in printed
    config = load_config(folder / "config.toml")
    assert summary["ledger"]["trained"] == config.run.total_batches * config.broker.batch_size
    assert config.learner.steps_per_batch == STEPS_PER_BATCH


def uninterrupted_losses(config: Config) -> list[float]:
    """The losses of one learner in memory that trains the first saved batches in order, one loss a step."""
    from nouscoder.learner.loading import prepare_thread
    from nouscoder.learner.model.weights import load_model
    from nouscoder.learner.state.run_files import RunFiles
    from nouscoder.learner.state.saved_batches import SavedBatches
    from nouscoder.learner.trainer import Trainer

    files = RunFiles.of(config)
    prepare_thread(config.learner.threads)
    trainer = Trainer(load_model(files.policy), config)
    batches = SavedBatches(files.batches, config.learner.keep_batches)
    return [step.loss for number in range(NUM_COMPARED) for step in trainer.train_batch(batches.load(number)).steps]
