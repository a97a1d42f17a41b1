"""The doctor's findings about a cluster, from recorded facts. tests/cluster has tests with a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes import client
from tests.recorded_cluster import RecordedCluster, amount

from nouscoder.doctor import Finding, report
from nouscoder.doctor.cluster import judge as doctor
from nouscoder.doctor.cluster.client import (
    Cluster,
    ClusterError,
    NotAllowed,
    PodRefused,
    StorageClass,
    lacks,
    requests_of,
    shown,
)
from nouscoder.doctor.cluster.trial import TrialResult

LOCAL_PATH = StorageClass("local-path", "rancher.io/local-path", True)
GVISOR: dict[str, object] = {
    "version": "Linux version 4.19.0-gvisor #1 SMP Sun Jan 10 15:06:54 PST 2016",
    "log": "<6>[   0.000000] Starting gVisor...",
    "files": ["version", "stat"],
    "calls": ["ENOSYS", "ENOSYS"],
}
GOOD = TrialResult(kernel=GVISOR, policy_enforced=True)


def looked_at(cluster: RecordedCluster, tried: TrialResult | ClusterError = GOOD) -> dict[str, Finding]:
    def trial(runtime_class: str | None) -> TrialResult:
        if isinstance(tried, ClusterError):
            raise tried
        return tried

    return {finding.name: finding for finding in doctor.examine_cluster(cluster, trial)}


def test_a_cluster_with_all_that_is_needed_can_run_the_default_install() -> None:
    findings = looked_at(RecordedCluster())
    text, code = report(list(findings.values()), "the default install", as_json=False)
    assert code == 0, text
    assert text.endswith("the default install can run here")
    assert list(findings) == ["API server", "RuntimeClass", "gVisor pod", "storage", "NetworkPolicy"]
    assert all(finding.ok for finding in findings.values())


def test_without_the_runtime_class_the_fix_is_named_and_no_gvisor_pod_is_tried() -> None:
    asked = []

    def trial(runtime_class: str | None) -> TrialResult:
        asked.append(runtime_class)
        return replace(GOOD, kernel=None)

    findings = {one.name: one for one in doctor.examine_cluster(RecordedCluster(runtime={"kata": "kata"}), trial)}
    assert asked == [None]
    assert "gVisor pod" not in findings
    assert (findings["RuntimeClass"].ok, findings["RuntimeClass"].needed) == (False, True)
    assert "kata" in findings["RuntimeClass"].detail
    assert "verifier.sandbox.backend=local" in findings["RuntimeClass"].fix


@pytest.mark.parametrize(
    ("changed", "ok"),
    [
        ({}, True),
        ({"version": "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"}, True),
        ({"log": "EPERM"}, False),
        ({"files": ["version", "stat", "interrupts", "softirqs"]}, False),
        ({"calls": ["EBADF", "EINVAL"]}, False),
    ],
)
def test_gvisor_is_detected_by_what_the_kernel_of_a_pod_answers(changed: dict[str, object], ok: bool) -> None:
    found = doctor.judge_kernel(replace(GOOD, kernel=GVISOR | changed))
    assert found.ok is ok
    assert str(changed.get("version", GVISOR["version"])).partition(" #")[0] in found.detail


@pytest.mark.parametrize(
    ("classes", "ok", "said"),
    [
        ([LOCAL_PATH], True, "local-path (default) by rancher.io/local-path, RWO"),
        ([StorageClass("efs", "efs.csi.aws.com", True)], True, "RWO and RWX"),
        ([replace(LOCAL_PATH, is_default=False)], False, "no default among: local-path"),
        ([], False, "none"),
    ],
)
def test_storage_needs_a_default_class(classes: list[StorageClass], ok: bool, said: str) -> None:
    finding = doctor.judge_storage(classes)
    assert (finding.ok, said in finding.detail) == (ok, True), finding


def test_an_unenforced_policy_is_reported_and_does_not_prevent_the_install() -> None:
    findings = looked_at(RecordedCluster(), replace(GOOD, policy_enforced=False))
    assert not findings["NetworkPolicy"].ok
    assert "NOT enforced" in findings["NetworkPolicy"].detail
    assert report(list(findings.values()), "the default install", as_json=False)[1] == 0


@pytest.mark.parametrize(
    ("refused", "name", "needed"),
    [
        ("version", "API server", True),
        ("runtime_classes", "RuntimeClass", True),
        ("storage_classes", "storage", True),
    ],
)
def test_a_missing_right_gives_an_unknown_finding(refused: str, name: str, needed: bool) -> None:
    finding = looked_at(RecordedCluster(refuses=frozenset({refused})))[name]
    assert (finding.ok, finding.known, finding.needed) == (False, False, needed)
    assert "may not" in finding.detail
    text, code = report([finding], "the default install", as_json=False)
    assert text.startswith("UNKNOWN" if needed else "unknown")
    assert code == int(needed)


@pytest.mark.parametrize("error", [NotAllowed("this account may not create namespaces"), ClusterError("no answer")])
def test_a_failed_trial_gives_unknown_findings(error: ClusterError) -> None:
    findings = looked_at(RecordedCluster(), error)
    for name in ("gVisor pod", "NetworkPolicy"):
        assert (findings[name].ok, findings[name].known) == (False, False)
        assert str(error) in findings[name].detail


@pytest.mark.parametrize(
    ("judge", "tried"),
    [
        (doctor.judge_kernel, replace(GOOD, kernel=ClusterError("the pod look cannot start: ErrImagePull"))),
        (doctor.judge_policy, replace(GOOD, policy_enforced=ClusterError("waited 60 s for an address"))),
    ],
)
def test_a_pod_that_did_not_start_says_why(judge: Callable[[TrialResult], Finding], tried: TrialResult) -> None:
    finding = judge(tried)
    (problem,) = [one for one in (tried.kernel, tried.policy_enforced) if isinstance(one, ClusterError)]
    assert (finding.ok, finding.known, finding.detail) == (False, False, f"unknown: {problem}")
    assert "--image" in finding.fix


@pytest.mark.parametrize("kubeconfig", ["/nowhere/kubeconfig", "unreachable"])
def test_without_a_cluster_the_doctor_prints_one_sentence(kubeconfig: str, tmp_path: Path) -> None:
    if kubeconfig == "unreachable":
        cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}
        user = {"name": "u", "user": {"token": "x"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        tree = {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "c"}
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(tree))
        kubeconfig = str(tmp_path / "kubeconfig")
    environment = {**os.environ, "KUBECONFIG": kubeconfig, "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "nouscoder", "doctor", "--cluster", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    if kubeconfig.startswith("/nowhere"):
        assert done.returncode == 69
        assert done.stderr.startswith("nouscoder: no cluster is configured: set KUBECONFIG")
        assert done.stderr.count("\n") == 1
    else:
        assert done.returncode == 1
        (finding,) = json.loads(done.stdout)["findings"]
        assert finding["name"] == "API server"
        assert "does not answer" in finding["detail"]


ANSWERS = {
    "good": (201, {"kind": "Pod", "spec": {"priority": 0}}),
    "bad": (403, {"message": "pods is forbidden: violates PodSecurity"}),
    "rights": (403, {"message": 'pods is forbidden: User "u" cannot create resource "pods"'}),
    "webhook": (500, {"message": "failed calling webhook w: no answer"}),
    "invalid": (422, {"message": "Pod is invalid: spec.containers[0].image: Required value"}),
}


# As Helm renders it: the client's own records refuse a quantity that is a number.
GPU = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": 1}}}


class Api(BaseHTTPRequestHandler):
    """Answers dry runs of pods, by their namespace."""

    def do_POST(self) -> None:
        pod = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        *_, namespace, _ = urlsplit(self.path).path.split("/")
        assert "dryRun=All" in self.path
        assert pod["metadata"] == {"namespace": namespace, "generateName": "p-"}
        assert pod["spec"] == {"containers": [GPU]}
        status, record = ANSWERS[namespace]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(record).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_dry_run_tells_a_refusal_from_missing_rights_and_from_no_answer() -> None:
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [GPU]}}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        api = client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.server_port}"))
        cluster = Cluster(api)
        assert cluster.dry_run(pod, "good")["spec"] == {"priority": 0}
        for namespace, kind in (("bad", PodRefused), ("invalid", PodRefused), ("rights", NotAllowed)):
            with pytest.raises(kind, match=r"forbidden|Required"):
                cluster.dry_run(pod, namespace)
        with pytest.raises(ClusterError, match="failed calling webhook") as failed:
            cluster.dry_run(pod, "webhook")
        assert type(failed.value) is ClusterError
    finally:
        server.shutdown()
        server.server_close()


def test_amounts_count_the_largest_init_container_and_the_overhead() -> None:
    def container(cpu: str, **devices: str) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu, "memory": "1Gi", **devices}}}

    spec = {
        "containers": [container("100m"), container("0.25", **{"nvidia.com/gpu": "2"})],
        "initContainers": [container("2")],
        "overhead": {"cpu": "1m", "memory": "1Mi"},
    }
    asked = requests_of(spec)
    assert asked == {"cpu": 2001, "memory": 2 * 1024**3 + 1024**2, "nvidia.com/gpu": 2}
    assert lacks(amount(2.1, 3 * 1024**3), asked) == ["nvidia.com/gpu"]
    assert shown(asked) == "2.00 cores, 2.00 GiB, 2 nvidia.com/gpu"
