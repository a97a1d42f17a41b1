"""A run ends and gives its pods back, goes on by an upgrade, is suspended within it, resumes, ends; all that once more.

The upgrades are Helm 4's, which applies on the server's side, without --force-conflicts.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from tests.cluster.conftest import CHART, NAME, SMALL_RUN

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(2400)]

FIRST, MANY = 3, 100  # batches
PARTS = ("broker", "verifier", "generation", "learner", "redis", "verifier.sandbox.pool")
LITTLE = (*(f"{part}.resources.requests.cpu=10m" for part in PARTS), "learner.runResources.requests.cpu=10m")
ACCOUNT = "--as=system:serviceaccount:{}:nouscoder-learner"


class Run:
    """The run of the release, wherever it is shown."""

    def __init__(self, release: Any) -> None:
        self.release = release

    def file(self, name: str) -> str:
        """A file of the run folder; "" while no pod shows it."""
        words = ["-n", self.release.namespace, "exec", f"service/{NAME}-learner", "-c", "run", "--"]
        done = subprocess.run(
            ["kubectl", *words, "cat", f"/runs/demo/{name}"], capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    def upgrade(self, *sets: str) -> None:
        words = (word for each in sets for word in ("--set", each))
        self.release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values", *words)

    def objects(self) -> set[str]:
        return set(self.release.kubectl("get", "deployments,statefulsets", "-o", "name").split())

    def ended_and_gave_back(self, at_least: int) -> None:
        """Wait for it, and check what the run has done."""
        self.release.until(
            lambda: self.gone() and self.is_shown(),
            "the run ends, its pods go, and another one shows it",
            1200,
        )
        summary: dict[str, Any] = json.loads(self.file("summary.json"))
        assert summary["balanced"]
        steps = [json.loads(line)["step"] for line in self.file("metrics.jsonl").splitlines()]
        assert steps == list(range(1, len(steps) + 1)), "every step is made once"
        assert summary["ledger"]["trained"] == 32 * len(steps) >= 64 * at_least
        assert "finished" in str(self.release.status()), "the broker stays"
        assert self.release.pods_of("redis"), "Redis stays"

    def gone(self) -> bool:
        left = {f"deployment.apps/{NAME}-generation", f"statefulset.apps/{NAME}-learner"} & self.objects()
        return not left and not self.release.pods_of("generation")

    def is_shown(self) -> bool:
        return any(pod.ready and pod.name.startswith(f"{NAME}-pages-") for pod in self.release.pods_of("learner"))


def test_a_finished_run_gives_back_its_pods_goes_on_and_is_suspended_within_it(release: Any) -> None:
    run = Run(release)
    sets = (*LITTLE, "whenFinished=release", "ttlSeconds=5", f"config.run.total_batches={FIRST}")
    small = (word for value in SMALL_RUN for word in ("--set-json", value))
    release.install(*(word for each in sets for word in ("--set", each)), *small)
    run.ended_and_gave_back(FIRST)

    def may(*words: str) -> bool:
        asked = ["kubectl", "auth", "can-i", *words, "-n", release.namespace, ACCOUNT.format(release.namespace)]
        return subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode == 0

    assert may("delete", "deployments/nouscoder-generation")
    assert may("patch", "deployments/nouscoder-pages", "--subresource=scale")
    for words in (
        ("delete", "deployments/nouscoder-broker"),
        ("delete", "statefulsets/nouscoder-redis"),
        ("patch", "deployments/nouscoder-pages"),
        ("patch", "deployments/nouscoder-generation", "--subresource=scale"),
        ("create", "pods"),
        ("get", "secrets"),
    ):
        assert not may(*words), words

    run.upgrade(f"config.run.total_batches={MANY}")
    release.until(lambda: release.step() > FIRST, "a further batch after an upgrade", 600)
    assert "deployment.apps/nouscoder-pages" not in run.objects()
    assert "deployment.apps/nouscoder-pages-again" in run.objects()
    suspended_within(run)
    run.ended_and_gave_back(FIRST + 1)
    last = release.step()
    run.upgrade(f"config.run.total_batches={last + 3}")
    release.until(lambda: release.step() > last, "a further batch after the second upgrade", 600)
    run.ended_and_gave_back(FIRST + 2)
    lines = [json.loads(line)["changes"] for line in run.file("config_history.jsonl").splitlines()]
    batches = [line["run.total_batches"] for line in lines if "run.total_batches" in line]
    print(f"\ncontinued by values: total_batches {batches}; steps {len(run.file('metrics.jsonl').splitlines())}")
    assert batches[0][0] == FIRST
    assert batches[-1][1] == last + 3


def suspended_within(run: Run) -> None:
    """Suspend the release while the run trains, and have it go on, with few batches left."""
    release, seen = run.release, run.release.step()
    claims = release.kubectl("get", "pvc", "-o", "name")
    run.upgrade("suspend=true")
    release.until(lambda: not release.pods(), "no pod of a suspended release is left", 240)
    assert release.kubectl("get", "pvc", "-o", "name") == claims
    run.upgrade("suspend=false")
    release.until(lambda: (now := release.step()) >= seen and now < MANY, "the run is back where it was", 600)
    run.upgrade(f"config.run.total_batches={seen + 6}")
