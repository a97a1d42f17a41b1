"""A killed run goes on at another learning rate, crashes again, and goes on after its end: each step has its rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.alone

MakeRun = Callable[..., Any]
FIRST, SECOND = 3e-4, 1e-6


def restarted(run: Any, *values: str) -> None:
    run._overrides = (*run._overrides, *values)
    run.start(resume=True)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_new_values_count_from_the_next_batch_on_last_and_continue_a_finished_run(loop_run: MakeRun) -> None:
    run = loop_run(f"learner.learning_rate={FIRST}", "learner.checkpoint_every_batches=100")
    begun = run._overrides
    run.start()
    run.until(lambda: len(run.steps()) >= 4, "two batches")
    run.kill_tree()
    done = run.steps()  # no checkpoint holds them, so they are trained again
    restarted(run, f"learner.learning_rate={SECOND}", "run.total_batches=6")
    run.until(lambda: len(run.steps()) > len(done) + 1, "another batch")
    run.kill_tree()
    new = ("learner.learning_rate", "run.total_batches")  # the command of the first start without them
    run._overrides = tuple(value for value in begun if not value.startswith(new))
    run.start(resume=True)
    assert run.wait(400) == 0, run.text()[-3000:]
    assert "resuming with run.total_batches 4 -> 6, learner.learning_rate 0.0003 -> 1e-6" in run.text()
    rates = [line["learning_rate"] for line in run.steps()]
    assert rates[: len(done)] == [FIRST] * len(done)
    assert set(rates[len(done) + 2 :]) == {SECOND}
    assert len(rates) == 12, "the second crash changed nothing of it"
    assert run.steps()[: len(done)] == done

    restarted(run, "run.total_batches=8")
    assert run.wait(400) == 0, run.text()[-3000:]
    assert "the run goes on after 6 batches; it had ended: every batch is trained" in run.text()
    assert [line["step"] for line in run.steps()] == list(range(1, 17))
    summary = run.summary()
    assert (summary["steps"], summary["balanced"], summary["ledger"]["trained"]) == (16, True, 8 * 16)
    history = [json.loads(line)["changes"] for line in (run.folder / "config_history.jsonl").read_text().splitlines()]
    assert [sorted(changes) for changes in history] == [
        ["learner.learning_rate", "run.total_batches"],
        ["run.total_batches"],
    ]
    assert (run.folder / "evaluations" / "00000006.json").exists()
    run.wait_until_gone()
