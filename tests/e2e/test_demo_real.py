"""`nouscoder demo --real`: SmolLM2-135M-Instruct learns on two cores, also when the run is killed in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from nouscoder.installation import how_to_install

MIN_GAIN = 0.2
KILLED_AFTER_STEPS = 15


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_real_model_learns_and_a_kill_in_between_loses_nothing(loop_run: Callable[..., Any], seed: int) -> None:
    pytest.importorskip("gguf", reason=f"the package gguf is not installed: {how_to_install('gguf')}")
    run = loop_run(defaults=())
    run.arguments = ("--real", "--seed", str(seed))
    run.start()
    run.until(lambda: len(run.steps()) >= KILLED_AFTER_STEPS, f"step {KILLED_AFTER_STEPS}", 2 * 3600)
    run.kill_tree()
    run.wait_until_gone()
    run.start(resume=True)
    assert run.wait(2 * 3600) == 0, run.text()[-3000:]

    summary = run.summary()
    print(json.dumps(summary))
    print(run.text()[-1500:])
    assert [line["step"] for line in run.steps()] == list(range(1, len(run.steps()) + 1))
    assert summary["balanced"] is True
    assert summary["pass_at_1_after"] - summary["pass_at_1_before"] >= MIN_GAIN
    page = (run.folder / "report.html").read_text(encoding="utf8")
    assert "a list of integers" in page, "the report shows pass@1 of each kind of problem"
