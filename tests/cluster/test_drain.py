"""Each pod of a run is evicted, as `kubectl drain` does it, and a generation pod is added. The run completes.

The broker's own log says when a verifier gave its leases back, and how many; the figures are printed.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from datetime import datetime
from typing import Any

import pytest
from tests.cluster.conftest import CHART, NAME, SMALL_RUN, PodState, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

BATCHES = 120  # the run must not end before the last eviction
SMALL = (
    f"config.run.total_batches={BATCHES}",
    *SMALL_RUN,
)
SERVICES = {"verifier", "generation", "broker", "redis", "learner"}
METRIC = re.compile(r"^nouscoder_generation_(tokens_total|policy_version) (\S+)$", re.MULTILINE)


def of(release: Release, component: str) -> list[PodState]:
    return [pod for pod in release.pods() if pod.component == component and not pod.ended]


def generator(release: Release, name: str) -> dict[str, float]:
    """The tokens that a generation pod has sampled, and its policy version."""
    with release.forward(f"pod/{name}", 9090) as port:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    return {name: float(value) for name, value in METRIC.findall(text)}


def stopped_workers(release: Release, since_s: float) -> dict[str, tuple[float, int]]:
    """Worker -> when it gave its leases back, and how many, by the broker's log."""
    found = {}
    for line in release.kubectl("logs", f"deployment/{NAME}-broker", "-c", "broker", "--tail=-1").splitlines():
        if '"a worker stopped"' in line:
            said = json.loads(line)
            at_s = datetime.fromisoformat(said["time"].replace("Z", "+00:00")).timestamp()
            if at_s >= since_s:
                found[said["worker_id"]] = (at_s, said["leases_given_back"])
    return found


def replaced(release: Release, pod: PodState) -> None:
    """Wait until the pod is gone and every service is ready again."""
    release.until(lambda: pod.uid not in {one.uid for one in release.pods()}, f"{pod.name} is gone", 180)
    release.until(lambda: release.all_ready(SERVICES), f"ready again without {pod.name}", 300)


def evicted_verifier(release: Release) -> tuple[float, int]:
    """Evict the runners and then the verifier, which holds leases then. Seconds until they are back, and how many."""
    for runner in of(release, "sandbox"):
        release.evict(runner)
    pod = of(release, "verifier")[0]
    at_s = release.evict(pod)

    def given_back() -> tuple[float, int] | None:
        return next((one for worker, one in stopped_workers(release, at_s).items() if pod.name in worker), None)

    back_s, leases = release.until(given_back, f"the broker has the leases of {pod.name}", 120)
    replaced(release, pod)
    return back_s - at_s, leases


def added_generator(release: Release) -> str:
    """Add a generation pod. It must get weights as new as those of the others had, and sample."""
    before = {pod.name for pod in of(release, "generation")}
    version = max(generator(release, name)["policy_version"] for name in before)
    began_s = time.monotonic()
    release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values", "--set", "generation.replicas=2")

    def samples() -> dict[str, float] | None:
        added = [pod for pod in of(release, "generation") if pod.name not in before and pod.ready]
        found = generator(release, added[0].name) if added else {"tokens_total": 0.0, "policy_version": -1.0}
        return found if found["tokens_total"] > 0 and found["policy_version"] >= version else None

    found = release.until(samples, "the added generator samples", 300)
    return (
        f"an added generator sampled {found['tokens_total']:.0f} tokens with policy {found['policy_version']:.0f}"
        f" {time.monotonic() - began_s:.0f} s after it was asked for (newest then: {version:.0f})"
    )


def test_a_generator_joins_a_run_and_each_pod_of_it_is_evicted(release: Any) -> None:
    release.install(*(word for value in SMALL for word in ("--set-json", value)))
    release.until(lambda: release.step() >= 1, "the run has begun", 600)
    back = [evicted_verifier(release) for _ in range(2)]
    while not any(leases for _, leases in back) and len(back) < 5:  # a verifier may be idle for a moment
        back.append(evicted_verifier(release))
    print("\nleases back at the broker:", ", ".join(f"{leases} after {took_s:.2f} s" for took_s, leases in back))
    print(added_generator(release))
    for component in ("generation", "broker", "redis", "learner"):
        for pod in of(release, component):
            at_s, batch = release.evict(pod), release.step()
            replaced(release, pod)
            print(f"{pod.name} evicted at batch {batch}, ready again after {time.time() - at_s:.0f} s")
    assert not release.run_file("summary.json"), "every pod was evicted during the run"
    summary = json.loads(release.until(lambda: release.run_file("summary.json"), "the run ends", 1200, every_s=5))
    print(summary["ledger"])
    assert any(leases for _, leases in back)
    assert summary["balanced"]
    assert summary["ledger"]["lost"] == 0
    assert summary["ledger"]["trained"] == BATCHES * 64
    steps = [json.loads(line)["step"] for line in release.run_file("metrics.jsonl").splitlines()]
    assert steps == sorted(set(steps)), "no step twice"
    assert len(steps) == 2 * BATCHES
