"""`nouscoder demo` with its defaults: the policy learns and the ledger balances."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.heavy),
        pytest.param(1, marks=pytest.mark.soak),
        pytest.param(2, marks=pytest.mark.soak),
    ],
)
def test_held_out_pass_at_1_rises_by_at_least_0_3(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-m", "nouscoder", "demo", "--seed", str(seed), "--set", f'run.root="{tmp_path}"']
    run = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    summary = json.loads((tmp_path / f"demo-{seed}" / "summary.json").read_text())
    print(json.dumps(summary))
    assert summary["pass_at_1_after"] - summary["pass_at_1_before"] >= 0.30
    assert summary["balanced"] is True
    assert "balanced yes" in run.stdout
    assert "balanced NO" not in run.stdout
