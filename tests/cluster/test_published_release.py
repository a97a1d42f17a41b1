"""From what a release publishes alone: `helm install nouscoder oci://...` from a registry, then `helm test`.

The images are those that the cluster has (localhost/nouscoder-*). NOUSCODER_RELEASE_CHART names the chart of
`make release VERSION=X`, whose archives the cluster has taken (`ctr -n k8s.io images import`); without it the chart is
packaged here, for the images of `make images`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
from tests.cluster.conftest import NAME, ROOT, SMALL_RUN, TAG, Release, installed_release
from tests.oci_registry import registry

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(2700)]

COMPONENTS = {"redis", "broker", "verifier", "sandbox", "generation", "learner"}
READY_LIMIT_S = 900.0


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of the chart in a registry, and its version."""
    folder = tmp_path_factory.mktemp("published")
    chart = os.environ.get("NOUSCODER_RELEASE_CHART", "")
    if not chart:
        described = (ROOT / "helm" / "nouscoder" / "Chart.yaml").read_text("utf8")
        (version,) = re.findall(r'^appVersion: "(.+)"$', described, re.MULTILINE)
        words = [sys.executable, str(ROOT / "deploy" / "package-chart"), version, str(folder)]
        chart = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    found = re.fullmatch(r"nouscoder-(\d+\.\d+\.\d+)\.tgz", Path(chart).name)
    assert found, chart
    with registry(folder) as host:
        helm_python.push(chart, f"oci://{host}/charts", plain_http=True)
        yield f"oci://{host}/charts/nouscoder", found[1]


@pytest.fixture(scope="module")
def installed(published: tuple[str, str]) -> Iterator[Release]:
    """The release that the one command makes, with every pod ready."""
    address, version = published
    values = ["global.imageRegistry=localhost", *SMALL_RUN, *([f"image.tag={TAG}"] if TAG else ())]
    with installed_release() as release:
        began = time.monotonic()
        words = [word for value in values for word in ("--set", value)]
        print("\n" + release.helm("install", NAME, address, "--version", version, "--plain-http", *words))
        release.until(lambda: release.all_ready(COMPONENTS), "every pod is ready", READY_LIMIT_S)
        print(f"every pod ready after {time.monotonic() - began:.0f} s")
        yield release


def test_the_pods_have_the_version_of_the_chart(published: tuple[str, str], installed: Release) -> None:
    """Chart, images and the program in them have one version."""
    _, version = published
    (listed,) = json.loads(installed.helm("list", "-o", "json"))
    assert (listed["chart"], listed["app_version"]) == (f"nouscoder-{version}", version)
    pods = json.loads(installed.kubectl("get", "pods", "-o", "json"))["items"]
    images = {one["image"] for pod in pods for one in pod["spec"]["containers"] if "/nouscoder-" in one["image"]}
    assert images == {f"localhost/nouscoder-{name}:{TAG or version}" for name in COMPONENTS - {"redis", "sandbox"}}
    said = installed.kubectl("exec", f"deploy/{NAME}-broker", "-c", "broker", "--", "nouscoder", "--version")
    print(said)
    if os.environ.get("NOUSCODER_RELEASE_CHART"):
        assert said == f"nouscoder {version}\n"


def test_helm_test_passes(installed: Release) -> None:
    began = time.monotonic()
    said: Any = installed.helm("test", NAME, "--logs", limit_s=600)
    print(f"helm test took {time.monotonic() - began:.0f} s\n{said[-1500:]}")
    assert "Succeeded" in said
