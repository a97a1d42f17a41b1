"""deploy/compose.yaml: its services are those of the chart's pods, with their configuration, rules and dashboards."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.services.test_metrics_and_dashboards import EXPRESSIONS, filled

from nouscoder.broker.redis_address import configured_url
from nouscoder.config import load_config

if TYPE_CHECKING:
    from tests.chart.conftest import ChartRig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "compose"
SERVICES = ("broker", "verifier", "generation", "learner")
# One machine: candidates in the verifier's own namespaces, and no tokens, because all ports are those of the machine.
VALUES: dict[str, Any] = {
    "verifier": {"sandbox": {"backend": "local"}, "tokens": {"create": False}},
    "prometheusRule": {"enabled": True},
}

Document = dict[str, Any]


@pytest.fixture(scope="module")
def compose() -> Document:
    loaded: Document = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text("utf8"))
    return loaded


def kept(file: Path, text: str) -> str:
    """The text of the file; NOUSCODER_UPDATE_GOLDEN=1 writes it first."""
    if os.environ.get("NOUSCODER_UPDATE_GOLDEN"):
        file.write_text(text, "utf8")
    return file.read_text("utf8")


def test_the_configuration_is_that_of_the_chart_with_the_names_of_the_containers(chart: ChartRig) -> None:
    text = chart.one("ConfigMap", "nouscoder-config", VALUES)["data"]["config.json"]
    text = re.sub(r"nouscoder-(\w+)(-metrics)?\.here\.svc", r"\1", text)
    assert kept(FOLDER / "config.json", text) == text
    config = load_config(FOLDER / "config.json")
    assert (config.verifier.grpc, config.learner.grpc) == ("verifier:50051", "learner:50054")
    assert not config.run.verifier_token_file
    assert configured_url(config.broker.model_copy(update={"redis_url_file": str(FOLDER / "redis-url")})) == (
        "redis://redis:6379/0"
    )


def test_the_rules_are_those_of_the_chart(chart: ChartRig, tmp_path: Path) -> None:
    spec = chart.one("PrometheusRule", "nouscoder", VALUES)["spec"]
    text = yaml.safe_dump(spec, sort_keys=False, width=200).replace('namespace="here"', 'namespace="compose"')
    text = "# Written by tests/chart/test_compose.py from the chart's PrometheusRule.\n" + text
    assert kept(FOLDER / "rules.yaml", text) == text
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    done = subprocess.run(
        ["promtool", "check", "config", str(FOLDER / "prometheus.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_service_has_the_command_of_its_pod(chart: ChartRig, compose: Document) -> None:
    found = {}
    for one in chart.documents(VALUES):
        if one["kind"] in ("Deployment", "StatefulSet"):
            for container in one["spec"]["template"]["spec"]["containers"]:
                found[container["name"]] = container
    for name in (*SERVICES, "run"):
        service = compose["services"][name]
        assert service["command"] == found[name]["args"]
        image = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["image"])
        assert image == found[name]["image"]
    assert found["broker"]["command"] == ["nouscoder"]  # the entry point of the images
    public = [one["image"] for one in compose["services"].values() if "nouscoder-" not in one["image"]]
    assert all(image.startswith("${MIRROR:+${MIRROR}/}") for image in public)
    assert public[0] == "${MIRROR:+${MIRROR}/}" + found["redis"]["image"].rpartition("/")[2]


def test_only_the_verifier_is_privileged_and_no_port_is_open_to_others(compose: Document) -> None:
    services = compose["services"]
    assert [name for name, one in services.items() if one.get("privileged")] == ["verifier"]
    ports = [port for one in services.values() for port in one.get("ports", [])]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for name in (*SERVICES, "run", "prepare"):
        assert services[name]["read_only"]
        assert services[name]["cap_drop"] == ([] if name == "verifier" else ["ALL"])


def test_every_folder_that_the_configuration_names_is_a_volume(compose: Document) -> None:
    named = json.loads((FOLDER / "config.json").read_text("utf8"))
    wanted = {
        "broker": {"/problems", named["problems"]["index"], "/tmp", named["broker"]["redis_url_file"]},
        "verifier": {named["verifier"]["tests"]["cache"], "/tmp"},
        "generation": {str(Path(named["generation"]["cache"]).parent), "/tmp"},
        "learner": {named["run"]["root"], "/problems", "/tmp"},
        "run": {named["run"]["root"], "/problems", "/tmp"},
    }
    for name, folders in wanted.items():
        service = compose["services"][name]
        mounted = {volume.split(":")[1] for volume in service["volumes"]} | set(service["tmpfs"])
        assert folders <= mounted, name
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (ROOT / "deploy" / source).exists(), volume


def test_prometheus_gives_the_labels_that_the_dashboards_read(compose: Document) -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text("utf8"))["scrape_configs"]
    given = {rule["target_label"] for rule in job["relabel_configs"]}
    given |= {label for config in job["static_configs"] for label in config["labels"]} | {"job", "instance"}
    of_metrics = {"le", "state", "verdict", "outcome", "cause", "stream", "reason", "stat", "side", "for", "correct"}
    of_metrics |= {
        "end",
        "backend",
        "cap",
        "client",
        "fate",
        "result",
        "status",
        "kind",
        "version",
        "revision",
        "groups",
        "k",
    }
    read = {label for _, expr, _ in EXPRESSIONS for label in re.findall(r"by \(([\w, ]+)\)", filled(expr))}
    assert {label.strip() for group in read for label in group.split(",")} <= given | of_metrics
    targets = [target for config in job["static_configs"] for target in config["targets"]]
    assert targets == [f"{name}:9090" for name in ("verifier", "broker", "generation", "learner")]
    assert {target.split(":")[0] for target in targets} <= set(compose["services"])
