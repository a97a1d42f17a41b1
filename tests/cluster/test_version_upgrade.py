"""A release is upgraded from an older version in a run: chart and images. The run completes, each step is made once.

The older version is a commit: that of NOUSCODER_UPGRADE_FROM, else the newest tag before this commit, else BASELINE.
Both charts are packaged, as a registry has them. The older images get a tag of their own and stay in the cluster, so
that a second test does not build them again; NOUSCODER_UPGRADE_FROM_TAG names images of that commit in the cluster.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.conftest import CHART, LOCAL, NAME, ROOT, SMALL_RUN, TAG, Release, output_of

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(5400)]

BASELINE = "ceea3de0854065b388b1472ab8d787ea00602833"  # until there is a tag
BATCHES = int(os.environ.get("NOUSCODER_UPGRADE_BATCHES", "80"))  # the run must not end before the upgrade does
ROLLOUTS_A_BATCH = 64
COMPONENTS = {"redis", "broker", "verifier", "sandbox", "generation", "learner"}
SERVICES = ("broker", "verifier", "generation", "learner")
BUILD_LIMIT_S = 3000.0


def older_commit() -> str:
    """The commit to upgrade from."""
    name = os.environ.get("NOUSCODER_UPGRADE_FROM", "")
    if not name:
        git = ("git", "-C", str(ROOT))
        tags = output_of(*git, "tag", "--list", "v[0-9]*", "--merged", "HEAD~1", "--sort=-v:refname").split()
        name = tags[0] if tags else BASELINE
    return output_of("git", "-C", str(ROOT), "rev-parse", "--verify", f"{name}^{{commit}}").strip()


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The packaged chart of the older commit, and the tag of its images."""
    commit, folder = older_commit(), tmp_path_factory.mktemp("older")
    (folder / "shared").symlink_to(ROOT.parent / "shared")  # deploy/images/build looks for its builder there
    checkout = folder / "checkout"
    output_of("git", "-C", str(ROOT), "worktree", "add", "--detach", str(checkout), commit)
    try:
        tag = os.environ.get("NOUSCODER_UPGRADE_FROM_TAG", "")
        if not tag:
            tag, began = f"older-{commit[:12]}", time.monotonic()
            build = [str(checkout / "deploy" / "images" / "build"), "--accelerator", "cpu", "--tag", tag]
            print("\n" + output_of(*build, limit_s=BUILD_LIMIT_S))
            print(f"images of {commit} after {time.monotonic() - began:.0f} s")
        output_of("helm", "package", str(checkout / "helm" / "nouscoder"), "--destination", str(folder))
        (package,) = folder.glob("*.tgz")
        yield package, tag
    finally:
        output_of("git", "-C", str(ROOT), "worktree", "remove", "--force", str(checkout))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The current chart, packaged."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf8"))["version"]
    command = (sys.executable, str(ROOT / "deploy" / "package-chart"), version)
    return output_of(*command, str(tmp_path_factory.mktemp("package"))).strip()


def images(release: Release) -> set[str]:
    """The images of the pods of both namespaces that are not being deleted."""
    found = set()
    for namespace in (release.namespace, release.runners):
        for pod in json.loads(release.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]:
            if "deletionTimestamp" not in pod["metadata"]:
                spec = pod["spec"]
                found |= {one["image"] for one in (*spec["containers"], *spec.get("initContainers", ()))}
    return {image for image in found if "/nouscoder-" in image}


def test_a_run_goes_on_after_an_upgrade_from_an_older_version(
    release: Any, older: tuple[Path, str], package: str
) -> None:
    chart, tag = older
    # Only values that both charts know: an older one may lack the section `evaluation`.
    small = (value for value in SMALL_RUN if not value.startswith("config.evaluation."))
    values = (f"config.run.total_batches={BATCHES}", *small)
    words = [word for value in values for word in ("--set-json", value)]
    release.helm("install", NAME, str(chart), *LOCAL, "--set", f"image.tag={tag}", *words)
    release.until(lambda: release.step() >= 3, "three batches of the older version", 900)
    assert all(image.endswith(f":{tag}") for image in images(release)), images(release)
    before = {pod.component: pod.uid for pod in release.pods()}
    at, began = release.step(), time.monotonic()
    release.helm("upgrade", NAME, package, "--reset-then-reuse-values", *LOCAL, "--set", f"image.tag={TAG}")

    def is_new() -> bool:
        pods = {pod.component: pod.uid for pod in release.pods()}
        renewed = all(pods.get(name) != before[name] for name in SERVICES)
        return renewed and release.all_ready(COMPONENTS) and not any(f":{tag}" in image for image in images(release))

    release.until(is_new, "every pod has the new version", 600)
    new_s, step = time.monotonic() - began, release.step()
    print(f"upgraded at batch {at}; every pod is new after {new_s:.0f} s, at batch {step}")
    assert 0 <= step < BATCHES, "the run was over before the upgrade was"
    summary = json.loads(release.until(lambda: release.run_file("summary.json"), "the run ends", 1800, every_s=5))
    print(summary)
    assert summary["balanced"]
    assert summary["ledger"]["lost"] == 0
    assert summary["ledger"]["trained"] == BATCHES * ROLLOUTS_A_BATCH
    steps = [json.loads(line)["step"] for line in release.run_file("metrics.jsonl").splitlines()]
    assert steps == list(range(1, 2 * BATCHES + 1)), "each step was made once"
