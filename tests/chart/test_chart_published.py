"""The chart as a stranger finds it: where its images come from, what Chart.yaml says, the package, the README."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import pytest
import yaml
from tests.chart.conftest import CHART, ROOT, merged, pod_specs

from nouscoder.doctor.cluster.judge import DEFAULT_IMAGE

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

PUBLISHED = re.compile(r"(nouscoder/nouscoder-[a-z]+|library/redis|oliver006/redis_exporter):[\w.-]+")
NAMED = ("default", "h200", "dual")  # together they have every image
LOCAL = {"global": {"imageRegistry": "localhost"}}
# docs/helm_annotations.md of Artifact Hub.
KNOWN = {"category", "changes", "containsSecurityUpdates", "images", "license", "links", "prerelease"}
HTTPS = re.compile(r"https://[a-z.]+/[\w./-]+")


def images(documents: list[dict[str, Any]]) -> set[str]:
    pods = [pod["spec"] for pod in pod_specs(documents).values()]
    return {one["image"] for pod in pods for one in (*pod.get("initContainers", ()), *pod["containers"])}


def test_every_image_is_published_and_one_value_makes_every_image_local(chart: ChartRig) -> None:
    for name in NAMED:
        values = chart.variants[name]
        found = images(chart.documents(values))
        assert len(found) >= 2
        assert [image for image in found if not PUBLISHED.fullmatch(image)] == [], name
        local = images(chart.documents(merged(values, LOCAL)))
        assert {image.partition("/")[0] for image in local} == {"localhost"}, name
        assert len(local) == len(found)
    assert "localhost/redis:7" in images(chart.documents(LOCAL))
    mirror = {"global": {"imageRegistry": "registry.example.com/team"}}
    assert "registry.example.com/team/redis:7" in images(chart.documents(mirror))


def test_the_image_of_the_doctor_is_the_charts(chart: ChartRig) -> None:
    assert PUBLISHED.fullmatch(DEFAULT_IMAGE)
    assert DEFAULT_IMAGE.partition(":")[0] in {image.partition(":")[0] for image in images(chart.documents())}


def test_the_chart_says_who_makes_it_and_where() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text("utf8"))
    assert described["home"] == described["sources"][0]
    for url in (described["home"], described["icon"], *described["sources"], described["maintainers"][0]["url"]):
        assert HTTPS.fullmatch(url), url
    icon = CHART / Path(described["icon"]).name
    assert icon.read_text("utf8").startswith("<svg ")
    notes = {name.removeprefix("artifacthub.io/"): text for name, text in described["annotations"].items()}
    assert notes.keys() <= KNOWN
    assert notes["license"] == "Apache-2.0"
    links = yaml.safe_load(notes["links"])
    assert len(links) == 3
    for link in links:
        assert HTTPS.fullmatch(link["url"])
        _, is_file, path = link["url"].partition("/blob/main/")
        assert not is_file or (ROOT / path).is_file(), link


def test_a_package_has_one_version_and_lists_its_images(chart: ChartRig, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "deploy" / "package-chart")]
    said = subprocess.run(
        [*command, "1.2.3-rc.1", str(tmp_path), "registry.example/me"], capture_output=True, text=True, check=True
    ).stdout
    package = tmp_path / "nouscoder-1.2.3-rc.1.tgz"
    assert Path(said.strip()) == package
    found = helm.lint(package, {}, strict=True, kube_version="v1.29.0")
    assert [one for one in found["messages"] if one["severity"] > 1] == []
    with helm.Chart.load(package) as packed:
        described: dict[str, Any] = dict(packed.metadata)
        config = packed.render({}, name="nouscoder", namespace="here")
    assert (described["version"], described["appVersion"]) == ("1.2.3-rc.1", "1.2.3-rc.1")
    assert described["annotations"]["artifacthub.io/prerelease"] == "true"
    listed = {one["image"] for one in yaml.safe_load(described["annotations"]["artifacthub.io/images"])}
    own = {one for one in listed if one.startswith("registry.example/me/")}
    assert {one.partition(":")[2] for one in own} == {"1.2.3-rc.1"}
    used = {image for name in NAMED for image in images(chart.documents(chart.variants[name]))}
    assert {one.partition(":")[0].replace("registry.example/me/", "nouscoder/") for one in listed} == {
        one.partition(":")[0] for one in used
    }
    assert "image: registry.example/me/nouscoder-broker:1.2.3-rc.1" in json.dumps(config)
    wrong = subprocess.run([*command, "v1.2", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (1, "package-chart: 'v1.2' is no version such as 1.2.3 or 1.2.3-rc.1\n")


def test_runbooks_are_absolute_and_of_this_version(chart: ChartRig) -> None:
    rule = chart.one("PrometheusRule", "nouscoder", {"prometheusRule": {"enabled": True}})
    urls = [
        one["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for one in group["rules"]
        if "alert" in one
    ]
    described = yaml.safe_load((CHART / "Chart.yaml").read_text("utf8"))
    start = f"{described['sources'][0]}/blob/v{described['appVersion']}/docs/operating.md#nouscoder"
    assert len(urls) > 10
    assert [url for url in urls if not url.startswith(start)] == []


def test_the_values_for_b200_are_refused_alone(chart: ChartRig) -> None:
    with pytest.raises(helm.HelmError, match=r"give both: -f values-h200\.yaml -f values-b200\.yaml"):
        chart.documents(chart.file("values-b200.yaml"))
    assert chart.documents(chart.kept["b200"])


def test_the_readme_has_every_value_and_every_file(chart: ChartRig) -> None:
    text = (CHART / "README.md").read_text("utf8")
    rows = set(re.findall(r"^\| (?:`|\*\*)([\w.]+)(?:`|\*\*) \|", text, re.MULTILINE))

    def missing(values: dict[str, Any], path: str) -> list[str]:
        found = []
        for name, value in values.items():
            inner = f"{path}.{name}".lstrip(".")
            if isinstance(value, dict) and value and inner not in rows:
                found += missing(value, inner) or [inner]
            elif isinstance(value, dict) and any(row.startswith(f"{inner}.") for row in rows):
                found += missing(value, inner)
            elif inner not in rows:
                found.append(inner)
        return found

    assert missing(chart.defaults, "") == []
    listed = set(re.findall(r"^\| (values[\w-]*\.yaml) \|", text, re.MULTILINE))
    assert listed == {file.name for file in CHART.glob("values*.yaml")}
    hooks = text.partition("\n## Hooks")[2].partition("\n## ")[0]
    shared = set.intersection(
        *(set(chart.defaults[name]) for name in ("broker", "verifier", "generation", "learner", "redis"))
    )
    own = {"image", "persistence", "resources", "replicas"}
    assert {name for name in shared - own if f"`{name}" not in hooks} == set()
