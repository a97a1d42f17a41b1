"""`nouscoder doctor --cluster` on a real cluster: its findings are right, and it leaves no objects."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nouscoder.doctor.cluster.client import Cluster, connect

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("NOUSCODER_DOCTOR_IMAGE", "localhost/nouscoder-verifier:0.1.0")
# An install that fits beside other releases.
LITTLE = """
broker: &little {resources: {requests: {cpu: 1m, memory: 1Mi}, limits: {memory: 1Gi}}}
redis: *little
generation: *little
learner: {<<: *little, runResources: {requests: {cpu: 1m, memory: 1Mi}, limits: {memory: 1Gi}}}
verifier: {<<: *little, sandbox: {pool: {<<: *little, candidateMemory: 512Mi}}}
"""
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
    # A failed trial is no result.
    assert findings["NetworkPolicy"]["known"]
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
    for name in ("RuntimeClass", "storage", "NetworkPolicy"):
        assert not findings[name]["known"], name
        assert "may not" in findings[name]["detail"]


def test_the_facts_of_a_real_cluster() -> None:
    cluster = Cluster(connect())
    assert cluster.version().startswith("v1.")
    assert all(cluster.runtime_classes().values())
    nodes, requested = cluster.nodes(), cluster.requested(besides="nothing")
    assert nodes
    assert {node.name for node in nodes} >= set(requested)
    for node in nodes:
        assert node.allocatable["cpu"] > 0
        assert node.allocatable["memory"] > 1024**2
    assert all(min(amount.values()) >= 0 for amount in requested.values())


@pytest.fixture
def namespace() -> Iterator[str]:
    """A namespace of its own that enforces PodSecurity restricted."""
    name = f"doctor-{secrets.token_hex(3)}"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false")


def of_install(namespace: str, values: str, folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and findings by name, those that are not ok first, of `doctor --cluster --values`."""
    file = folder / "values.yaml"
    file.write_text(values)
    command = [*COMMAND[:5], "--values", str(file), "-n", namespace, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["findings"]
    assert all(one["fix"] for one in found if not one["ok"])
    return done.returncode, {one["name"]: one for one in sorted(found, key=lambda one: not one["ok"])}


def everything(namespace: str) -> str:
    kinds = "all,secrets,configmaps,persistentvolumeclaims,roles,networkpolicies,serviceaccounts"
    cluster_wide = kubectl("get", "namespaces,validatingadmissionpolicies", "-o", "name").split()
    return kubectl("get", kinds, "-n", namespace, "-o", "name") + str([one for one in cluster_wide if namespace in one])


def test_an_install_that_fits_can_run_and_nothing_in_the_cluster_changes(namespace: str, tmp_path: Path) -> None:
    before = everything(namespace)
    code, findings = of_install(namespace, LITTLE, tmp_path)
    assert code == 0, [one for one in findings.values() if not one["ok"]]
    assert findings["pods"]["detail"] == "6 of 6 are admitted"
    assert everything(namespace) == before


def test_everything_that_would_refuse_a_pod_is_found_at_once(namespace: str, tmp_path: Path) -> None:
    kubectl("create", "quota", "few", "--hard=pods=2,limits.memory=900Mi", "-n", namespace)
    values = """
broker: {serviceAccount: {name: nobody}}
generation: {runtimeClassName: kata}
config: {learner: {device: cuda}}
learner:
  workload: leaderWorkerSet
  resources: {requests: {cpu: 100m, memory: 64Mi, nvidia.com/gpu: 1}, limits: {memory: 2Gi, nvidia.com/gpu: 1}}
  persistence: {storageClass: fast}
verifier: {sandbox: {backend: local}}
"""
    code, findings = of_install(namespace, values, tmp_path)
    assert code == 1
    expected = {
        "pod of Deployment/nouscoder-verifier": "PodSecurity",
        "pod of Deployment/nouscoder-broker": "serviceAccount",
        "pod of Deployment/nouscoder-generation": "RuntimeClass",
        "pod of LeaderWorkerSet/nouscoder-learner-group (leader)": "quota",
        "RuntimeClass kata": "runtimeClassName",
        "PersistentVolumeClaim/nouscoder-runs": "storageClass",
        "a node for LeaderWorkerSet/nouscoder-learner-group (leader)": "nvidia.com/gpu",
    }
    for name, said in expected.items():
        assert name in findings, (name, list(findings))
        assert not findings[name]["ok"], name
        assert said in f"{findings[name]['detail']} {findings[name]['fix']}", findings[name]


def test_an_absent_namespace_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    code, findings = of_install("nothing-of-this-name", "{}", tmp_path)
    assert code == 1
    found = findings["pod of Deployment/nouscoder-broker"]
    assert "kubectl create namespace nothing-of-this-name" in found["fix"]
    assert findings["RuntimeClass gvisor"]["ok"]


def test_an_account_without_rights_is_told_which_are_missing(namespace: str, tmp_path: Path) -> None:
    settings = json.loads(kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    settings["users"][0]["user"] = {"token": kubectl("create", "token", "default", "-n", namespace).strip()}
    (tmp_path / "kubeconfig").write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        code, findings = of_install(namespace, "{}", tmp_path)
    assert code == 1
    unknown = {name: one for name, one in findings.items() if not one["known"]}
    assert {"classes", "storage", "room", "pod of Deployment/nouscoder-broker"} <= set(unknown)
    assert all(re.match("unknown: .*(may not|cannot create|cannot get)", one["detail"]) for one in unknown.values())
