"""A learner of two pods trains over gloo, beside two generation pods, and goes on after each of them was lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.cluster.conftest import SMALL_RUN

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(3600)]

BATCHES = 40
ROLLOUTS_A_BATCH = 64
CLAIM = "runs-of-both"
VALUES = (
    *SMALL_RUN,
    f"config.run.total_batches={BATCHES}",
    "config.learner.rank_patience_s=60",
    "learner.pods=2",
    f"learner.persistence.existingClaim={CLAIM}",
    "generation.replicas=2",
)
# Both pods are on the only node, so a volume of one node is enough.
VOLUME = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": CLAIM},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}},
}


def test_two_pods_train_together_and_go_on_after_each_was_lost(release: Any) -> None:
    release.kubectl("create", "-f", "-", given=json.dumps(VOLUME))
    release.install(*(word for value in VALUES for word in ("--set-json", _quoted(value))))
    release.until(lambda: release.step() >= 2, "two batches are trained", 900)
    assert {0, 1} <= set(_trained_by_worker(release)), "rank 1 trains each batch too"
    assert len([pod for pod in release.pods() if pod.component == "generation"]) == 2
    for component in ("learner-worker", "learner", "generation", "learner-worker"):
        pod, at = release.pod(component), release.step()
        release.kubectl("delete", "pod", pod.name, "--wait=false", "--grace-period=0", "--force", limit_s=120)
        deleted_s = time.monotonic()
        release.until(lambda uid=pod.uid: uid not in {one.uid for one in release.pods()}, f"{pod.name} is gone", 120)
        release.until(lambda at=at: release.step() >= at + 2, f"training goes on without {pod.name}", 600)
        print(f"{pod.name} deleted at batch {at}: two batches later after {time.monotonic() - deleted_s:.0f} s")
    summary = json.loads(release.until(lambda: release.run_file("summary.json"), "the run ends", 1800, every_s=5))
    print(summary)
    steps = [json.loads(line)["step"] for line in release.run_file("metrics.jsonl").splitlines()]
    assert summary["balanced"]
    assert summary["ledger"]["trained"] == BATCHES * ROLLOUTS_A_BATCH
    assert steps == list(range(1, 2 * BATCHES + 1)), "each step was made once"
    assert summary["pass_at_1_after"] > summary["pass_at_1_before"]


def _quoted(value: str) -> str:
    """A value of --set-json, which takes a text only in quotes."""
    key, _, text = value.partition("=")
    return value if text.replace(".", "", 1).isdigit() else f"{key}={json.dumps(text)}"


def _trained_by_worker(release: Any) -> list[int]:
    """The batches that the second pod's log says it has trained."""
    lines = release.kubectl("logs", release.pod("learner-worker").name).splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    return [int(line["number"]) for line in logged if line.get("work") == "train"]
