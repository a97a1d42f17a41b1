"""`nouscoder demo --engine vllm` learns. It is run by `make test-vllm-demo`, in the environment that has vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nouscoder.config import load_config

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(3600)]

# The demo has 80.
NUM_BATCHES = 30
MIN_GAIN = 0.15


def test_held_out_pass_at_1_rises_with_the_vllm_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nouscoder", "demo", "--engine", "vllm", "--name", "demo-vllm"]
    for value in (f'run.root="{tmp_path}"', f"run.total_batches={NUM_BATCHES}"):
        command += ["--set", value]
    run = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    summary = json.loads((tmp_path / "demo-vllm" / "summary.json").read_text())
    print(json.dumps(summary))
    assert summary["pass_at_1_after"] - summary["pass_at_1_before"] >= MIN_GAIN
    assert summary["balanced"] is True
    lines = [json.loads(line) for line in (tmp_path / "demo-vllm" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == summary["steps"] == 2 * NUM_BATCHES
    assert load_config(tmp_path / "demo-vllm" / "config.toml").generation.engine == "vllm"
