"""Deletes each kind of pod during a run, with and without a grace period: the run completes and the ledger balances."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.cluster.conftest import SMALL_RUN

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

COMPONENTS = ["sandbox", "verifier", "generation", "broker", "redis", "learner"]
BATCHES = 60  # on a busy machine the run must not end before the last deletion
SMALL = (
    f"config.run.total_batches={BATCHES}",
    *SMALL_RUN,
)
FORCED = ("--grace-period=0", "--force")


def test_every_kind_of_pod_can_be_deleted_during_a_run(release: Any) -> None:
    release.install(*(word for value in SMALL for word in ("--set-json", value)))
    release.until(lambda: release.step() >= 1, "the run has begun", 600)
    for how in (FORCED, ()):
        for component in COMPONENTS:
            at = release.step()
            pod = release.pod(component)
            release.kubectl("delete", "pod", pod.name, "-n", pod.namespace, "--wait=false", *how, limit_s=120)
            release.until(lambda pod=pod: pod.uid not in _uids(release), f"{component} is gone", 120)
            release.until(lambda: release.all_ready(set(COMPONENTS)), f"ready again without {pod.name}", 300)
            _balances(release)
            print(f"{component} deleted {'by force' if how else 'gently'} at batch {at}, now at {release.step()}")
    summary = json.loads(release.until(lambda: release.run_file("summary.json"), "the run ends", 1200, every_s=5))
    print(summary)
    assert summary["balanced"]
    ledger = summary["ledger"]
    assert ledger["trained"] == BATCHES * 64
    steps = [json.loads(line)["step"] for line in release.run_file("metrics.jsonl").splitlines()]
    assert steps == sorted(set(steps)), "no step twice"
    assert len(steps) == 2 * BATCHES


def _uids(release: Any) -> set[str]:
    return {pod.uid for pod in release.pods()}


def _balances(release: Any) -> None:
    status = release.until(release.status, "the broker answers", 120)
    assert status["balanced"], status
