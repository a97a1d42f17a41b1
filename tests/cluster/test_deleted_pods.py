"""Deletes pods during a run, with and without a grace period: the run completes and the ledger balances."""

from __future__ import annotations

import json
import math
import os
import random
import time
from typing import Any

import pytest
from tests.cluster.conftest import SMALL_RUN

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(2400)]

COMPONENTS = ["sandbox", "verifier", "generation", "broker", "redis", "learner"]
BATCHES = 60  # on a busy machine the run must not end before the last deletion
SMALL = (
    f"config.run.total_batches={BATCHES}",
    *SMALL_RUN,
)
QUICKEST_BATCH_S = 3.0  # on two cores without any deletion
ROLLOUTS_A_BATCH = 64
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
            status = release.until(release.status, "the broker answers", 120)
            assert status["balanced"], status
            print(f"{component} deleted {'by force' if how else 'gently'} at batch {at}, now at {release.step()}")
    summary, steps = _at_its_end(release)
    assert summary["balanced"]
    assert summary["ledger"]["trained"] == BATCHES * ROLLOUTS_A_BATCH
    assert steps == list(range(1, 2 * BATCHES + 1)), "each step was made once"


@pytest.mark.timeout(5400)
def test_random_deletions_for_ten_minutes(release: Any) -> None:
    """Deletes pods at random moments for NOUSCODER_DELETION_SECONDS (600), drawn from NOUSCODER_SEED (0).

    It does not wait until the one before is ready again, so several kinds are missing at once. The run has so many
    batches that it must still go on at the last deletion.
    """
    draw = random.Random(int(os.environ.get("NOUSCODER_SEED", "0")))
    limit_s = float(os.environ.get("NOUSCODER_DELETION_SECONDS", "600"))
    batches = math.ceil(limit_s / QUICKEST_BATCH_S)
    values = (f"config.run.total_batches={batches}", *SMALL_RUN)
    release.install(*(word for value in values for word in ("--set-json", value)))
    release.until(lambda: release.step() >= 1, "the run has begun", 600)
    num_deleted, due = 0, time.monotonic()
    end = due + limit_s
    while due < end:
        component, how = draw.choice(COMPONENTS), draw.choice((FORCED, ()))
        found = release.until(lambda one=component: _pod_of(release, one), f"a pod of {component}", 300)
        release.kubectl("delete", "pod", *found, "--wait=false", "--ignore-not-found", *how, limit_s=120)
        num_deleted += 1
        due += draw.uniform(10, 50)
        release.until(lambda at=due: time.monotonic() >= at, "the next deletion", 120, every_s=0.5)
    status = release.until(release.status, "the broker answers", 300)
    print(f"{num_deleted} pods deleted; {status}")
    assert status["batches_committed"] < batches, "the run was over before the last deletion"
    assert not status["finished"]
    summary, steps = _at_its_end(release)
    assert summary["balanced"]
    assert summary["ledger"]["trained"] == batches * ROLLOUTS_A_BATCH
    assert steps == list(range(1, 2 * batches + 1)), "each step was made once"


def _pod_of(release: Any, component: str) -> list[str]:
    """The name of a pod of the component and the option of its namespace; [] while there is none."""
    found = release.pods_of(component)
    return [found[0].name, "-n", found[0].namespace] if found else []


def _at_its_end(release: Any) -> tuple[dict[str, Any], list[int]]:
    """The summary of the ended run, and the steps that it made, in order."""
    summary = json.loads(release.until(lambda: release.run_file("summary.json"), "the run ends", 1800, every_s=5))
    print(summary)
    return summary, [json.loads(line)["step"] for line in release.run_file("metrics.jsonl").splitlines()]


def _uids(release: Any) -> set[str]:
    return {pod.uid for pod in release.pods()}
