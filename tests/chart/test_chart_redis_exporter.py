"""The exporter in the pod of Redis: its parts of the chart, and its settings with a real exporter and a real Redis."""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.request
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
from tests.redis_process import free_port, until

from nouscoder.broker.redis_server import find_redis_binary

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chart.conftest import ChartRig

ON: dict[str, Any] = {"redis": {"exporter": {"enabled": True}}, "serviceMonitor": {"enabled": True}}


def test_the_exporter_can_be_scraped_and_reached_by_nobody_else(chart: ChartRig) -> None:
    redis = chart.one("StatefulSet", "nouscoder-redis", ON)
    kubernetes_validate.validate(redis, "1.29", strict=True)
    pod = redis["spec"]["template"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == "9121"
    (exporter,) = [one for one in pod["spec"]["containers"] if one["name"] == "exporter"]
    assert exporter["ports"] == [{"name": "exporter", "containerPort": 9121}]
    assert exporter["securityContext"] == pod["spec"]["containers"][0]["securityContext"]
    ports = chart.one("Service", "nouscoder-redis", ON)["spec"]["ports"]
    assert {"name": "exporter", "port": 9121, "targetPort": "exporter"} in ports
    monitor = chart.one("ServiceMonitor", "nouscoder-redis", ON)
    assert [one["port"] for one in monitor["spec"]["endpoints"]] == ["exporter"]
    rules = chart.one("NetworkPolicy", "nouscoder-redis", ON)["spec"]["ingress"]
    scrapes = [rule for rule in rules if rule["ports"] == [{"protocol": "TCP", "port": 9121}]]
    assert [rule["from"] for rule in scrapes] == [chart.defaults["networkPolicy"]["metricsFrom"]]
    closed = chart.one("NetworkPolicy", "nouscoder-redis", {**ON, "networkPolicy": {"metricsFrom": []}})
    assert "9121" not in str(closed)


def test_without_the_exporter_nothing_of_it_is_rendered(chart: ChartRig) -> None:
    assert "exporter" not in str(chart.documents({}))


def test_an_annotation_of_the_values_replaces_that_of_the_chart(chart: ChartRig) -> None:
    own = {"prometheus.io/scrape": "false", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "team": "rl"}
    values = {"redis": {**ON["redis"], "podAnnotations": own}, "broker": {"podAnnotations": own}}
    for kind, name in (("StatefulSet", "redis"), ("Deployment", "broker")):
        found = chart.one(kind, f"nouscoder-{name}", values)["spec"]["template"]["metadata"]["annotations"]
        assert own.items() <= found.items()


@pytest.mark.parametrize("component", ["broker", "verifier", "generation", "learner", "redis"])
def test_an_autoscaler_may_evict_every_pod_but_the_learners(chart: ChartRig, component: str) -> None:
    kind = "StatefulSet" if component in ("learner", "redis") else "Deployment"
    pod = chart.one(kind, f"nouscoder-{component}")["spec"]["template"]
    allowed = pod["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"]
    assert allowed == ("false" if component == "learner" else "true")


def test_the_settings_are_those_that_the_exporter_reads(chart: ChartRig, tmp_path: Path) -> None:
    program, binary = shutil.which("prometheus-redis-exporter"), find_redis_binary()
    if program is None or binary is None:
        pytest.skip("redis-server or the exporter is missing: apt-get install redis-server prometheus-redis-exporter")
    containers = chart.one("StatefulSet", "nouscoder-redis", ON)["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value", "secret") for one in containers[1]["env"]}
    port, pages = free_port(), free_port()
    variables = {name: text.replace("6379", str(port)).replace("9121", str(pages)) for name, text in variables.items()}
    server = [binary, "--port", str(port), "--requirepass", "secret", "--save", "", "--dir", str(tmp_path)]
    with (
        subprocess.Popen(server, stdout=subprocess.DEVNULL) as redis,
        subprocess.Popen([program], env={**os.environ, **variables}, stderr=subprocess.DEVNULL) as exporter,
    ):
        try:
            text = until_up(f"http://127.0.0.1:{pages}/metrics")
        finally:
            exporter.kill()
            redis.kill()
    assert "redis_memory_used_bytes" in text
    assert "redis_memory_max_bytes" in text


def until_up(url: str) -> str:
    """The page, once it says that Redis answers."""
    pages: list[str] = [""]

    def is_up() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                pages.append(answer.read().decode())
        except OSError:
            return False
        return "\nredis_up 1" in pages[-1]

    until(is_up, "the exporter shows Redis")
    return pages[-1]
