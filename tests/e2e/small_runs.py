"""Runs that begin with a small policy of a test: the command `nouscoder train`, and the pass@1 that it measures."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path


def trained(folder: Path, name: str, config: str, *values: str) -> tuple[float, float]:
    """pass@1 before and after the run folder/runs/NAME. It is also printed, with its standard error.

    Paths in the configuration begin in the folder, whose held_out.jsonl has the held-out problems. `values` are
    settings as for --set.
    """
    file = folder / f"{name}.toml"
    file.write_text(config)
    command = [sys.executable, "-m", "nouscoder", "train", file.name]
    for value in (f'run.name="{name}"', f'run.root="{folder}/runs"', *values):
        command += ["--set", value]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    assert summary["balanced"] is True
    before, after = float(summary["pass_at_1_before"]), float(summary["pass_at_1_after"])
    num_problems = len((folder / "held_out.jsonl").read_text().splitlines())
    print(
        f"seed {summary['seed']}, {name}: pass@1 {with_error(before, num_problems)} before,"
        f" {with_error(after, num_problems)} after {summary['steps']} steps; {summary['learning_seconds']} s",
        flush=True,
    )
    return before, after


def with_error(pass_at_1: float, num_problems: int) -> str:
    """pass@1 and its standard error, from one rollout for each of `num_problems` problems."""
    return f"{pass_at_1:.3f} +- {math.sqrt(pass_at_1 * (1 - pass_at_1) / num_problems):.3f}"
