"""Monitoring of a release: its dashboards, and scraping of every service with the labels that the dashboards use."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Protocol

import pytest

BOARDS = ("Run", "Verifier", "Broker", "Generation", "Cost")
ROOT = Path(__file__).parents[2]
SERVICES = ("verifier", "broker", "generation", "learner")
CHOSEN_BY = ("app.kubernetes.io/instance", "app.kubernetes.io/component")

Document = dict[str, Any]


class Chart(Protocol):
    variants: dict[str, dict[str, Any]]

    def documents(self, values: dict[str, Any] | None = None, name: str = "nouscoder") -> list[Document]: ...


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [one for one in documents if one["kind"] == kind]


def dashboards(documents: list[Document]) -> dict[str, Document]:
    found = [one for one in of_kind(documents, "ConfigMap") if "grafana_dashboard" in one["metadata"]["labels"]]
    return {one["metadata"]["name"]: one for one in found}


def test_the_dashboards_are_configmaps_that_grafanas_sidecar_finds(chart: Chart) -> None:
    found = dashboards(chart.documents({}))
    assert set(found) == {f"nouscoder-dashboard-{title.lower()}" for title in BOARDS}
    titles = {json.loads(text)["title"] for one in found.values() for text in one["data"].values()}
    assert titles == {f"NousCoder / {title}" for title in BOARDS}
    assert all(one["metadata"]["labels"]["grafana_dashboard"] == "1" for one in found.values())


@pytest.mark.heavy
def test_the_dashboards_have_grafanas_types() -> None:
    """Fetches the packages of Grafana's types once, and compiles the files with them."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing: apt-get install npm")
    command = [str(ROOT / "deploy" / "check-dashboard-types")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(BOARDS)} dashboards have the types of" in done.stdout


def test_without_the_loop_only_the_verifier_has_a_dashboard(chart: Chart) -> None:
    assert set(dashboards(chart.documents({"loop": {"enabled": False}}))) == {"nouscoder-dashboard-verifier"}


def test_the_namespace_of_dashboards_can_be_set_and_they_can_be_disabled(chart: Chart) -> None:
    values = {"dashboards": {"namespace": "grafana", "labels": {"team": "rl"}}}
    for one in dashboards(chart.documents(values)).values():
        assert one["metadata"]["namespace"] == "grafana"
        assert one["metadata"]["labels"]["team"] == "rl"
    assert dashboards(chart.documents({"dashboards": {"enabled": False}})) == {}


def test_service_monitors_are_rendered_on_request(chart: Chart) -> None:
    assert of_kind(chart.documents({}), "ServiceMonitor") == []


@pytest.mark.parametrize("loop", [True, False])
def test_each_service_monitor_selects_one_service_and_adds_the_labels_of_dashboards(chart: Chart, loop: bool) -> None:
    monitor = {"enabled": True, "labels": {"release": "prometheus"}, "interval": "7s"}
    documents = chart.documents({"loop": {"enabled": loop}, "serviceMonitor": monitor})
    scraped = []
    for one in of_kind(documents, "ServiceMonitor"):
        wanted = one["spec"]["selector"]["matchLabels"].items()
        (endpoint,) = one["spec"]["endpoints"]
        selected = [two for two in of_kind(documents, "Service") if wanted <= two["metadata"]["labels"].items()]
        ports = {two["metadata"]["name"]: [port["name"] for port in two["spec"]["ports"]] for two in selected}
        (service,) = [two for two in selected if endpoint["port"] in ports[two["metadata"]["name"]]]
        assert endpoint["interval"] == "7s"
        assert one["metadata"]["labels"]["release"] == "prometheus"
        assert one["spec"]["targetLabels"] == list(CHOSEN_BY)
        assert set(CHOSEN_BY) <= set(service["metadata"]["labels"])
        assert one["spec"]["namespaceSelector"] == {"matchNames": ["here"]}
        scraped.append(service["metadata"]["labels"]["app.kubernetes.io/component"])
    assert sorted(scraped) == sorted(SERVICES if loop else ("verifier",))


def test_pods_have_annotations_and_labels_for_scrapers_of_pods(chart: Chart) -> None:
    documents = chart.documents({})
    pods = [
        one["spec"]["template"]["metadata"]
        for kind in ("Deployment", "StatefulSet")
        for one in of_kind(documents, kind)
    ]
    scraped = [pod for pod in pods if pod["annotations"].get("prometheus.io/scrape") == "true"]
    assert {pod["labels"]["app.kubernetes.io/component"] for pod in scraped} == set(SERVICES)
    assert all(pod["annotations"]["prometheus.io/port"] == "9090" for pod in scraped)
    assert all(set(CHOSEN_BY) <= set(pod["labels"]) for pod in scraped)


def test_the_run_reaches_the_learner_in_its_own_pod_over_loopback(chart: Chart) -> None:
    """Through the Service, the pod would connect to itself, which the NetworkPolicies do not allow."""
    documents = chart.documents({})
    learner = next(one for one in of_kind(documents, "StatefulSet") if one["metadata"]["name"] == "nouscoder-learner")
    (config,) = [one for one in of_kind(documents, "ConfigMap") if "config.json" in one["data"]]
    host = json.loads(config["data"]["config.json"])["learner"]["grpc"].rpartition(":")[0]
    assert learner["spec"]["template"]["spec"]["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": [host]}]


def test_the_evaluations_of_the_run_use_an_existing_token(chart: Chart) -> None:
    documents = chart.documents({})
    (config,) = [one for one in of_kind(documents, "ConfigMap") if "config.json" in one["data"]]
    file = json.loads(config["data"]["config.json"])["run"]["verifier_token_file"]
    learner = next(one for one in of_kind(documents, "StatefulSet") if one["metadata"]["name"] == "nouscoder-learner")
    (settings,) = [one for one in learner["spec"]["template"]["spec"]["volumes"] if one["name"] == "settings"]
    secrets = [one["secret"] for one in settings["projected"]["sources"] if "secret" in one]
    paths = {f"/etc/nouscoder/{item['path']}": (one["name"], item["key"]) for one in secrets for item in one["items"]}
    assert paths[file] == ("nouscoder-verifier-tokens", "token")
