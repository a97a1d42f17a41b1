"""The CronJob backs up a run in its middle; the claims are deleted; an install from the backup goes on with the run.

Then the same CronJob makes VolumeSnapshots. No CSI driver runs: the test says when one is ready, as a driver does.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import CHART, NAME, SMALL_RUN

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(2400)]

BATCHES = 20
MODULE = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.2.0"
PARTS = (
    "redis.r",
    "broker.r",
    "verifier.r",
    "verifier.sandbox.pool.r",
    "generation.r",
    "learner.r",
    "learner.runR",
    "backup.r",
)
VALUES = (
    *(word for value in SMALL_RUN for word in ("--set-json", value)),
    *("--set-json", "config.learner.checkpoint_every_batches=3", "--set", f"config.run.total_batches={BATCHES}"),
    *("--set", "backup.schedule=0 3 1 1 *", "--set", "backup.persistence.size=1Gi"),
    *(word for part in PARTS for word in ("--set", f"{part}esources.requests.cpu=5m")),  # beside other releases
)


def back_up(release: Any, name: str, meanwhile: Any = None) -> str:
    """Run the CronJob now, and return what it says once it is done."""
    release.kubectl("create", "job", f"--from=cronjob/{NAME}-backup", name)
    if meanwhile is not None:
        meanwhile()
    with suppress(pytest.fail.Exception):  # the log says why
        release.kubectl("wait", "--for=condition=Complete", f"job/{name}", "--timeout=180s", limit_s=200)
    return str(release.kubectl("logs", f"job/{name}"))


def test_a_run_goes_on_from_a_backup_after_its_claims_are_gone(release: Any) -> None:
    release.install(*VALUES)
    release.until(lambda: release.step() >= 5, "five batches", 900)
    said = back_up(release, "first")
    found = re.fullmatch(r"backup (\d{8}-\d{6}) is whole: demo at step (\d+)\n", said)
    assert found, said
    release.until(lambda: release.step() >= 12, "batches after the backup", 600)

    release.helm("uninstall", NAME, "--wait")
    release.kubectl("delete", "pvc", f"{NAME}-runs", f"{NAME}-redis", "--timeout=120s", limit_s=150)
    release.install(*VALUES, "--set", f"restore.from={found[1]}")
    with pytest.raises(pytest.fail.Exception, match="the release is at work with later policies"):
        release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values", "--set", "restore.from=20200101-000000")
    release.until(lambda: release.step() > 0, "the run goes on", 600)
    restored = release.kubectl("logs", f"{NAME}-learner-0", "-c", "restore")
    assert f"is restored from {found[1]}, at step {found[2]}" in restored
    print(f"\nbackup at step {found[2]}, batch {release.step()} a moment after the restore")

    learner = release.pod("learner")
    release.kubectl("delete", "pod", learner.name, "--wait=false", "--grace-period=0", "--force", limit_s=120)
    release.until(lambda: any(pod.uid != learner.uid and pod.ready for pod in release.pods_of("learner")), "again", 300)
    assert "nothing is done" in release.kubectl("logs", f"{NAME}-learner-0", "-c", "restore")

    summary = json.loads(release.until(lambda: release.run_file("summary.json"), "the run ends", 1200))
    assert summary["balanced"]
    assert summary["ledger"]["trained"] == 64 * BATCHES
    steps = [json.loads(line)["step"] for line in release.run_file("metrics.jsonl").splitlines()]
    assert steps == [*range(1, 2 * BATCHES + 1)]


@pytest.fixture
def snapshots() -> Iterator[None]:
    """The kind VolumeSnapshot, as its Go module has it, removed unless the cluster had it."""
    if (go := shutil.which("go")) is None:
        pytest.skip("the CRD comes from the Go module proxy, and this machine has no go")
    found = subprocess.run([go, "mod", "download", "-json", MODULE], capture_output=True, text=True, check=True)
    crd = Path(json.loads(found.stdout)["Dir"]) / "config" / "crd" / "snapshot.storage.k8s.io_volumesnapshots.yaml"
    made = subprocess.run(["kubectl", "create", "-f", crd], capture_output=True, check=False).returncode == 0
    subprocess.run(["kubectl", "wait", "--for=condition=Established", "--timeout=60s", "-f", crd], check=True)
    yield
    if made:
        subprocess.run(["kubectl", "delete", "-f", crd, "--timeout=60s"], check=True)


@pytest.mark.usefixtures("snapshots")
def test_the_cronjob_makes_snapshots_with_its_own_rights_and_keeps_the_newest(release: Any) -> None:
    values = ("--set", "backup.volumeSnapshotClass=csi", "--set", "backup.keep=1", "--set", "restore.from=")
    release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values", *values)

    def names() -> list[str]:
        return str(release.kubectl("get", "volumesnapshots", "-o", "name")).split()

    for number in (1, 2):

        def driver(before: tuple[str, ...] = tuple(names())) -> None:
            (new,) = release.until(lambda: {*names()} - {*before}, "a snapshot", 120)
            ready = json.dumps({"status": {"readyToUse": True}})
            release.kubectl("patch", new, "--subresource=status", "--type=merge", "-p", ready)

        assert "is whole" in back_up(release, f"snapshot-{number}", driver)
    (kept,) = names()
    spec = json.loads(release.kubectl("get", kept, "-o", "json"))["spec"]
    assert spec == {"volumeSnapshotClassName": "csi", "source": {"persistentVolumeClaimName": f"{NAME}-runs"}}
    with pytest.raises(pytest.fail.Exception, match="a claim is filled only when it is made"):
        release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values", "--set", "restore.from=other")
