"""`nouscoder doctor --cluster` on a real cluster: its findings are right, and it leaves no objects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nouscoder.doctor.cluster.client import KubernetesCluster, connect

pytestmark = pytest.mark.cluster

IMAGE = os.environ.get("NOUSCODER_DOCTOR_IMAGE", "localhost/nouscoder-verifier:0.1.0")
COMMAND = [sys.executable, "-m", "nouscoder", "doctor", "--cluster", "--image", IMAGE]


def kubectl(*arguments: str) -> str:
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def own_namespaces() -> list[str]:
    selector = "app.kubernetes.io/managed-by=nouscoder-doctor"
    return kubectl("get", "namespaces", "-l", selector, "-o", "name").split()


def test_findings_equal_those_of_kubectl_and_no_object_is_left() -> None:
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, text=True, timeout=280, check=False)
    record = json.loads(done.stdout)
    findings = {one["name"]: one for one in record["findings"]}
    assert record["ok"] is (done.returncode == 0)
    assert kubectl("version", "-o", "json").count(findings["API server"]["detail"].split()[0]) >= 1
    has_gvisor = "runtimeclass.node.k8s.io/gvisor" in kubectl("get", "runtimeclasses", "-o", "name").split()
    assert findings["RuntimeClass"]["ok"] is has_gvisor
    assert findings.get("gVisor pod", {"ok": False})["ok"] is has_gvisor, findings
    default = [
        item["metadata"]["name"]
        for item in json.loads(kubectl("get", "storageclasses", "-o", "json"))["items"]
        if item["metadata"].get("annotations", {}).get("storageclass.kubernetes.io/is-default-class") == "true"
    ]
    assert findings["storage"]["ok"] is bool(default)
    assert all(name in findings["storage"]["detail"] for name in default)
    assert all(one["fix"] for one in record["findings"] if not one["ok"])
    # A failed trial is no result: both of these must be known.
    assert findings["NetworkPolicy"]["known"]
    assert findings["PodSecurity"]["ok"]
    has_policies = "validatingadmissionpolicies" in kubectl("api-resources", "--api-group=admissionregistration.k8s.io")
    assert findings["admission policy"]["ok"] is has_policies
    assert own_namespaces() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_doctor_removes_its_objects(number: signal.Signals) -> None:
    # A job that a shell runs in the background ignores SIGINT, and so would a program that it starts.
    before = signal.signal(number, signal.default_int_handler)
    try:
        running = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(number, before)
    end = time.monotonic() + 60
    while not own_namespaces():
        assert running.poll() is None
        assert time.monotonic() < end
        time.sleep(0.2)
    running.send_signal(number)
    assert running.wait(timeout=120) != 0
    assert own_namespaces() == []


def test_a_missing_image_is_named() -> None:
    command = [*COMMAND[:-1], "localhost/nothing-of-this-name:0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert not findings["NetworkPolicy"]["known"]
    assert "cannot start: Err" in findings["NetworkPolicy"]["detail"]
    assert "--image" in findings["NetworkPolicy"]["fix"]
    assert own_namespaces() == []


def test_missing_rights_are_reported(tmp_path: Path) -> None:
    """Uses a service account without rights, with the CA and the address of the real cluster."""
    settings = json.loads(kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    token = kubectl("create", "token", "default", "-n", "kube-public").strip()
    settings["users"][0]["user"] = {"token": token}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(settings))
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    done = subprocess.run(
        [*COMMAND, "--json"], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert findings["API server"]["ok"]  # every account may read the version
    assert findings["Prometheus operator"]["known"]
    for name in ("RuntimeClass", "storage", "room", "NetworkPolicy"):
        assert not findings[name]["known"], name
        assert "may not" in findings[name]["detail"]


def test_the_client_fulfils_the_protocol_of_cluster() -> None:
    cluster = KubernetesCluster(connect())
    assert cluster.version().startswith("v1.")
    assert all(cluster.runtime_classes().values())
    nodes, requested = cluster.nodes(), cluster.requested()
    assert nodes
    assert {node.name for node in nodes} >= set(requested)
    for node in nodes:
        assert node.allocatable.cpu_cores > 0
        assert node.allocatable.memory_bytes > 1024**2
    assert all(amount.cpu_cores >= 0 for amount in requested.values())
    assert not cluster.has_resource("nothings.example.invalid")
