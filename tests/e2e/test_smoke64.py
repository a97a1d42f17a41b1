"""`nouscoder train --smoke64` with real services on the demo's policy, killed once: the reward rises."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nouscoder.config import load_config
from nouscoder.demo.prepare import prepare

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def command(root: Path, *more: str) -> list[str]:
    """The demo's configuration, with few held-out problems."""
    values = [f'run.root="{root}"', "run.name=mine", "demo.held_out_problems=8", "evaluation.samples=1"]
    options = [part for value in values for part in ("--set", value)]
    return [sys.executable, "-m", "nouscoder", "train", str(DEMO), "--smoke64", "--json", *options, *more]


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_the_reward_rises_on_64_problems_also_when_the_test_is_killed_once(tmp_path: Path) -> None:
    values = [f'run.root="{tmp_path}"', "run.name=mine", "demo.held_out_problems=8"]
    prepare(load_config(DEMO, values), lambda done, total, loss: None)
    folder = tmp_path / "mine-smoke64"
    with (tmp_path / "output").open("ab") as output:
        first = subprocess.Popen(command(tmp_path), stdout=output, stderr=output)
        until = time.monotonic() + 1500
        while lines(folder / "02-training/rewards.jsonl") < 3:
            assert first.poll() is None, (tmp_path / "output").read_text()[-3000:]
            assert time.monotonic() < until
            time.sleep(0.2)
        first.kill()
        first.wait(60)
    rates = (folder / "01-pass-rates/pass_rates.jsonl").read_text()
    done = subprocess.run(command(tmp_path, "--resume"), capture_output=True, text=True, timeout=2000)
    result: dict[str, Any] = json.loads(done.stdout)
    print(json.dumps(result))
    assert done.returncode == 0, done.stderr[-3000:]
    assert result["direction"] == "rises"
    assert result["num_problems"] == 64
    assert lines(folder / "02-training/rewards.jsonl") == result["num_batches"] == 24
    assert (folder / "01-pass-rates/pass_rates.jsonl").read_text() == rates, "measured once"
    chosen = json.loads((folder / "problems.json").read_text())["problem_ids"]
    counts = {line["problem_id"]: line for line in map(json.loads, rates.splitlines())}
    assert all(0 < counts[name]["passed"] < counts[name]["sampled"] == 8 for name in chosen)
