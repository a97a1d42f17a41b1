"""An evaluation during a real run: of one version, while the learner trains the next ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_training_goes_on_while_a_version_is_measured(loop_run: Callable[..., Any]) -> None:
    run = loop_run(
        *("run.total_batches=12", "evaluation.every_batches=3"),
        *("demo.held_out_problems=40", "evaluation.samples=2"),
    )
    run.start()
    assert run.wait(1000) == 0, run.text()[-3000:]
    steps, files = run.steps(), sorted((run.folder / "evaluations").glob("*.json"))
    assert [line["step"] for line in steps] == list(range(1, 25))
    assert run.summary()["balanced"] is True
    assert files, "no version was measured"
    trained_meanwhile = []
    for file in files:
        record = json.loads(file.read_text())
        assert (record["policy_version"], record["num_rollouts"]) == (int(file.stem), 80)
        later = [line for line in steps if line["policy_version"] > record["policy_version"]]
        trained_meanwhile.append(sum(line["time"] < file.stat().st_mtime for line in later))
    print(f"{len(files)} evaluations; optimizer steps until each was recorded: {trained_meanwhile}")
    assert any(trained_meanwhile)
    evaluated = {0: json.loads((run.folder / "evaluation_before.json").read_text())["pass_at_1"]}
    evaluated |= {int(file.stem): json.loads(file.read_text())["pass_at_1"] for file in files}
    evaluated[12] = json.loads((run.folder / "evaluation_after.json").read_text())["pass_at_1"]
    best = max(evaluated, key=lambda version: (evaluated[version], -version))
    kept = sorted(folder.name for folder in (run.folder / "kept").glob("*"))
    if not kept:  # the best is the first policy, or the last one, whose checkpoint is the newest
        assert best in (0, 12)
        return
    assert kept == [f"{best:08d}", f"{best:08d}.checkpoint"]
    progress = json.loads((run.folder / "kept" / kept[1] / "state.json").read_text())["progress"]
    assert (progress["batch_id"], progress["step"]) == (best - 1, 2 * best)
