"""The node is drained of each component of a run by `kubectl drain`, and a generation pod is added. The run completes.

The broker's own log says when a verifier gave its leases back, and how many. On one node an evicted pod stays Pending
until `kubectl uncordon`, so that a drain of two pods under one budget would never end there: the components are drained
while each has one pod, and the two generation pods are evicted later, one after the other. Runners have no budget.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from datetime import datetime
from typing import Any

import pytest
from tests.cluster.conftest import CHART, NAME, SMALL_RUN, PodState, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

BATCHES = 80  # the run must not end before the last eviction, which was at batch 34
SMALL = (
    f"config.run.total_batches={BATCHES}",
    *SMALL_RUN,
)
SERVICES = {"verifier", "generation", "broker", "redis", "learner"}
BACK_LIMIT_S = 2.0  # from the eviction of a verifier until the broker has its leases
EVICTING = re.compile(r"evicting pod [^/]+/(\S+)")


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


def leases_back(release: Release, pod: str, at_s: float) -> tuple[float, int]:
    """Seconds after `at_s` until the broker had the leases of an evicted verifier, and how many those were."""

    def given_back() -> tuple[float, int] | None:
        return next((one for worker, one in stopped_workers(release, at_s).items() if pod in worker), None)

    back_s, leases = release.until(given_back, f"the broker has the leases of {pod}", 120)
    return back_s - at_s, leases


def evicted_verifier(release: Release) -> tuple[float, int]:
    """Evict the runners and then the verifier, which holds leases then. See `leases_back`."""
    for runner in release.pods_of("sandbox"):
        release.evict(runner)
    pod = release.pods_of("verifier")[0]
    back = leases_back(release, pod.name, release.evict(pod))
    replaced(release, pod)
    return back


def drained(release: Release, node: str, component: str) -> dict[str, float]:
    """Drain the node of the pods of a component, and leave it cordoned. Pod -> when it was evicted."""
    selector = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component={component}"
    where = "jsonpath={.items[*].metadata.namespace}"
    everywhere = set(release.kubectl("get", "pods", "-A", "-l", selector, "-o", where).split())
    assert everywhere <= {release.namespace, release.runners}, f"kubectl drain would evict pods of all of {everywhere}"
    options = ("--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={selector}", "--timeout=240s")
    said: list[str] = []
    evicted: dict[str, float] = {}
    command = ["kubectl", "drain", node, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if found := EVICTING.match(line):
                evicted.setdefault(found[1], time.time())
    assert process.returncode == 0, "".join(said)
    assert evicted, said
    return evicted


def drained_and_back(release: Release, *components: str) -> dict[str, float]:
    """Drain the node of one component after the other, then uncordon it; all are ready again. See `drained`."""
    first, batch, began_s = release.pods_of(components[0])[0], release.step(), time.monotonic()
    node = release.kubectl("get", "pod", first.name, "-n", first.namespace, "-o", "jsonpath={.spec.nodeName}")
    evicted: dict[str, float] = {}
    try:
        for component in components:
            evicted |= drained(release, node, component)
    finally:
        release.kubectl("uncordon", node)
    left_s = time.monotonic() - began_s
    release.until(lambda: release.all_ready(SERVICES), f"ready again without {', '.join(evicted)}", 300)
    print(
        f"drained at batch {batch}: {', '.join(sorted(evicted))}; gone after {left_s:.0f} s,"
        f" ready again {time.monotonic() - began_s - left_s:.0f} s after kubectl uncordon"
    )
    return evicted


def added_generator(release: Release) -> str:
    """Add a generation pod. It must get weights as new as those of the others had, and sample."""
    before = {pod.name for pod in release.pods_of("generation")}
    version = max(release.generation_metrics(name)["policy_version"] for name in before)
    began_s = time.monotonic()
    release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values", "--set", "generation.replicas=2")

    def samples() -> dict[str, float] | None:
        added = [pod for pod in release.pods_of("generation") if pod.name not in before and pod.ready]
        found = release.generation_metrics(added[0].name) if added else {"tokens_total": 0.0, "policy_version": -1.0}
        return found if found["tokens_total"] > 0 and found["policy_version"] >= version else None

    found = release.until(samples, "the added generator samples", 300)
    return (
        f"an added generator sampled {found['tokens_total']:.0f} tokens with policy {found['policy_version']:.0f}"
        f" {time.monotonic() - began_s:.0f} s after it was asked for (newest then: {version:.0f})"
    )


def drained_while_it_holds_leases(release: Release) -> tuple[float, int]:
    """Drain the runners, then their verifier, which cannot finish its work. See `leases_back`."""
    pod = release.pod("verifier").name
    evicted = drained_and_back(release, "sandbox", "verifier")
    return leases_back(release, pod, evicted[pod])


def test_a_run_survives_the_drain_of_each_component_and_a_generator_joins(release: Any) -> None:
    release.install(*(word for value in SMALL for word in ("--set-json", value)))
    release.until(lambda: release.step() >= 1, "the run has begun", 600)
    back = [drained_while_it_holds_leases(release), evicted_verifier(release)]
    while not any(leases for _, leases in back) and len(back) < 5:  # a verifier may be idle for a moment
        back.append(evicted_verifier(release))
    print("\nleases back at the broker:", ", ".join(f"{leases} after {took_s:.2f} s" for took_s, leases in back))
    assert any(leases for _, leases in back)
    assert max(took_s for took_s, _ in back) <= BACK_LIMIT_S
    for component in ("generation", "broker", "redis", "learner"):
        drained_and_back(release, component)
    print(added_generator(release))
    for pod in release.pods_of("generation"):
        at_s, batch = release.evict(pod), release.step()
        replaced(release, pod)
        print(f"{pod.name} evicted at batch {batch}, ready again after {time.time() - at_s:.0f} s")
    assert not release.run_file("summary.json"), "every pod was evicted during the run"
    summary = json.loads(release.until(lambda: release.run_file("summary.json"), "the run ends", 1200, every_s=5))
    print(summary["ledger"])
    assert summary["balanced"]
    assert summary["ledger"]["lost"] == 0
    assert summary["ledger"]["trained"] == BATCHES * 64
    steps = [json.loads(line)["step"] for line in release.run_file("metrics.jsonl").splitlines()]
    assert steps == sorted(set(steps)), "no step twice"
    assert len(steps) == 2 * BATCHES
