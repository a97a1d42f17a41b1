"""A Prometheus of a test's own: it scrapes pods, the kubelet and kube-state-metrics, and has the rules of releases.

Each alert is there twice: with the durations (`for`) of the chart, and with those divided by `FASTER`. The label `pace`
tells them apart. Their expressions are the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.conftest import CHART, NAME, Release, output_of

FASTER = 30
SCRAPE_S = 5
TARGETS = Path("/run/k8s-cluster/prometheus-targets.json")  # ../shared/cluster writes it: the annotated pods
KUBE_STATE_METRICS = "k8s.io/kube-state-metrics/v2@v2.17.0"
_BUILD_S = 1800
_RULES = "templates/common/prometheusrule.yaml"
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass
class Prometheus:
    """The running server, and the files of its rules."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]
    state_port: int

    def follow(self, release: Release) -> set[str]:
        """Take the rules that the chart has for the release's values. Returns the names of the alerts."""
        values = release.helm("get", "values", NAME, "-o", "yaml")
        (self.folder / "values.yaml").write_text(values)
        options = ("--set", "prometheusRule.enabled=true,verifier.sandbox.backend=gvisor", "-s", _RULES)
        text = release.helm("template", NAME, str(CHART), "-f", str(self.folder / "values.yaml"), *options)
        groups = yaml.safe_load(text)["spec"]["groups"]
        records, alerts = [
            [rule for g in groups for rule in g["rules"] if kind in rule] for kind in ("record", "alert")
        ]
        fast = [_paced(rule, "fast", FASTER) for rule in alerts]
        real = [_paced(rule, "real", 1) for rule in alerts]
        written = [{"name": "rules", "rules": [*records, *fast, *real]}]
        (self.folder / f"{release.namespace}.rules.yaml").write_text(yaml.safe_dump({"groups": written}))
        self.process.send_signal(signal.SIGHUP)
        return {rule["alert"] for rule in alerts}

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        asked = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return list(json.load(answer)["data"]["result"])

    def firing(self, release: Release, pace: str = "fast", over: str = "") -> set[str]:
        """The alerts of the release that fire, or that have fired within `over`, such as [5m]."""
        chosen = f'ALERTS{{namespace="{release.namespace}",alertstate="firing",pace="{pace}"}}'
        found = self.query(f"max_over_time({chosen}{over})" if over else chosen)
        return {sample["metric"]["alertname"] for sample in found}


def _paced(rule: dict[str, Any], pace: str, divisor: int) -> dict[str, Any]:
    number, unit = int(rule["for"][:-1]), rule["for"][-1]
    seconds = -(-number * _UNITS[unit] // divisor)
    return rule | {"for": f"{seconds}s", "labels": rule["labels"] | {"pace": pace}}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _kube_state_metrics() -> Path:
    """The program, built once from the Go module proxy (minutes), beside kubectl or in the user's cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nouscoder"
    program = folder / "kube-state-metrics"
    if not program.exists():
        given = {
            "CGO_ENABLED": "0",
            "GOFLAGS": "-buildvcs=false -trimpath",
            "GOTOOLCHAIN": "local",
            "GOBIN": str(folder),
        }
        command = ["go", "install", KUBE_STATE_METRICS]
        subprocess.run(command, check=True, timeout=_BUILD_S, env=os.environ | given)
    return program


@contextlib.contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.terminate()


def _wait(url: str, log: Path) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=30).close()
            return
        except OSError:
            assert time.monotonic() < end, f"{url} does not answer: {log.read_text()[-2000:]}"
            time.sleep(0.5)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Prometheus]:
    """The server, until the end of the block. Skips where the cluster is not that of ../shared/cluster."""
    if shutil.which("prometheus") is None or not TARGETS.exists():
        pytest.skip("this needs the program prometheus and a cluster of ../shared/cluster/up --with prometheus")
    ports = {name: _free_port() for name in ("prometheus", "proxy", "state")}
    (node,) = output_of("kubectl", "get", "nodes", "-l", "!nouscoder.io/kwok", "-o", "name").split()
    jobs: list[dict[str, Any]] = [
        {"job_name": "pods", "file_sd_configs": [{"files": [str(TARGETS)], "refresh_interval": "5s"}]},
        {
            "job_name": "kubelet",
            "metrics_path": f"/api/v1/nodes/{node.partition('/')[2]}/proxy/metrics",
            "static_configs": [{"targets": [f"127.0.0.1:{ports['proxy']}"]}],
        },
        {
            "job_name": "kube-state-metrics",
            "honor_labels": True,
            "static_configs": [{"targets": [f"127.0.0.1:{ports['state']}"]}],
        },
    ]
    every = f"{SCRAPE_S}s"
    written = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(folder / "*.rules.yaml")],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(written))
    server = [
        *("prometheus", "--config.file", str(folder / "prometheus.yaml"), "--storage.tsdb.path", str(folder / "data")),
        *("--web.listen-address", f"127.0.0.1:{ports['prometheus']}"),
    ]
    proxy = ["kubectl", "proxy", f"--port={ports['proxy']}"]
    url = f"http://127.0.0.1:{ports['prometheus']}"
    with (
        _process(proxy, folder / "proxy.log"),
        _process(server, folder / "prometheus.log") as process,
    ):
        _wait(f"{url}/-/ready", folder / "prometheus.log")
        yield Prometheus(url, folder, process, ports["state"])


@contextlib.contextmanager
def kube_state_metrics(prometheus: Prometheus) -> Iterator[None]:
    """Its series of CronJobs, until the end of the block."""
    log, telemetry = prometheus.folder / "state.log", _free_port()
    command = [
        *(str(_kube_state_metrics()), "--kubeconfig", os.environ["KUBECONFIG"], "--resources=cronjobs"),
        *("--host=127.0.0.1", f"--port={prometheus.state_port}"),
        *("--telemetry-host=127.0.0.1", f"--telemetry-port={telemetry}"),
    ]
    with _process(command, log):
        _wait(f"http://127.0.0.1:{prometheus.state_port}/metrics", log)
        yield
