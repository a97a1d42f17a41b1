"""The doctor's findings about a cluster, from recorded facts. tests/cluster has tests with a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.recorded_cluster import RecordedFacts

from nouscoder.doctor.cluster import judge as doctor
from nouscoder.doctor.cluster.facts import Amount, ClusterError, Node, NotAllowed, StorageClass, Taint
from nouscoder.doctor.cluster.trial import TrialResult
from nouscoder.doctor.finding import Finding, report

GIB = 1024**3
LOCAL_PATH = StorageClass("local-path", "rancher.io/local-path", True, frozenset({"ReadWriteOnce"}))
NODE = Node("node1", Amount(2, 23 * GIB), True)
GVISOR: dict[str, object] = {
    "version": "Linux version 4.19.0-gvisor #1 SMP Sun Jan 10 15:06:54 PST 2016",
    "log": "<6>[   0.000000] Starting gVisor...",
    "files": ["version", "stat"],
    "calls": ["ENOSYS", "ENOSYS"],
}
GOOD = TrialResult(
    kernel=GVISOR,
    policy_enforced=True,
    restricted_refuses=True,
)


@dataclass(kw_only=True)
class RecordedCluster(RecordedFacts):
    """A `Cluster` with recorded facts."""

    storage: list[StorageClass] = field(default_factory=lambda: [LOCAL_PATH])
    node_list: list[Node] = field(default_factory=lambda: [NODE])
    has_policies: bool = True

    def has_resource(self, name: str) -> bool:
        self.ask("has_resource")
        return name == doctor.POLICIES and self.has_policies


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
    assert {name for name, finding in findings.items() if not finding.ok} == {"GPUs", "Prometheus operator"}
    assert all(finding.fix for finding in findings.values() if not finding.ok)


@pytest.mark.parametrize(
    ("version", "ok"),
    [("v1.29.0", True), ("v1.34.4-gke.100", True), ("v1.28.15", False), ("v2.0.0", True), ("?", False)],
)
def test_the_oldest_server_version_equals_that_of_the_chart(version: str, ok: bool) -> None:
    assert doctor.judge_version(version).ok is ok
    chart = yaml.safe_load((Path(__file__).parents[2] / "helm/nouscoder/Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={doctor.OLDEST[0]}.{doctor.OLDEST[1]}.0-0"


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
    found = doctor.judge_kernel(TrialResult(kernel=GVISOR | changed))
    assert found.ok is ok
    assert str(changed.get("version", GVISOR["version"])).partition(" #")[0] in found.detail


@pytest.mark.parametrize(
    ("classes", "ok", "said"),
    [
        ([LOCAL_PATH], True, "local-path (default) by rancher.io/local-path, RWO"),
        ([StorageClass("efs", "efs.csi.aws.com", True)], True, "RWO and RWX"),
        ([replace(LOCAL_PATH, access_modes=frozenset({"ReadWriteMany"}))], True, "in use: ReadWriteMany"),
        ([replace(LOCAL_PATH, is_default=False)], False, "no default among: local-path"),
        ([], False, "none"),
    ],
)
def test_storage_needs_a_default_class(classes: list[StorageClass], ok: bool, said: str) -> None:
    finding = doctor.judge_storage(classes)
    assert (finding.ok, said in finding.detail) == (ok, True), finding


@pytest.mark.parametrize(
    ("nodes", "ok"),
    [
        ([NODE], True),
        ([replace(NODE, open=False)], False),
        ([replace(NODE, taints=(Taint("gpu", "", "NoSchedule"),))], False),
        ([replace(NODE, allocatable=Amount(0.9, 23 * GIB))], False),
        ([replace(NODE, name=str(index), allocatable=Amount(0.3, GIB)) for index in range(5)], True),
        ([replace(NODE, name=str(index), allocatable=Amount(8, GIB // 2)) for index in range(9)], False),
    ],
    ids=["one node", "closed", "tainted", "too few cores", "spread over five", "no node holds the learner"],
)
def test_there_is_room_when_every_pod_fits_on_a_node(nodes: list[Node], ok: bool) -> None:
    assert doctor.judge_room((nodes, {})).ok is ok


def test_requests_of_other_pods_reduce_the_room() -> None:
    assert doctor.judge_room(([NODE], {"node1": Amount(0.9, GIB)})).ok
    assert not doctor.judge_room(([NODE], {"node1": Amount(1.2, GIB)})).ok


def test_the_requests_of_the_install_equal_the_charts_values() -> None:
    values: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "helm/nouscoder/values.yaml").read_text())
    learner = amount_of(values["learner"]["resources"]) + amount_of(values["learner"]["runResources"])
    pool = values["verifier"]["sandbox"]["pool"]
    others = [amount_of(values[name]["resources"]) for name in ("generation", "verifier", "broker", "redis")]
    pods = [learner, *others, *[amount_of(pool["resources"])] * (pool["size"] + pool["spares"])]
    by_size = sorted(pods, key=lambda pod: (-pod.memory_bytes, -pod.cpu_cores))
    assert [(round(pod.cpu_cores, 6), pod.memory_bytes) for pod in doctor.INSTALL] == [
        (round(pod.cpu_cores, 6), pod.memory_bytes) for pod in by_size
    ]


def amount_of(resources: dict[str, Any]) -> Amount:
    cpu, memory = str(resources["requests"]["cpu"]), resources["requests"]["memory"]
    cores = float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
    units = {"Mi": 1024**2, "Gi": GIB}
    return Amount(cores, int(memory[:-2]) * units[memory[-2:]])


def test_an_unenforced_policy_is_reported_and_does_not_prevent_the_install() -> None:
    findings = looked_at(RecordedCluster(), replace(GOOD, policy_enforced=False))
    assert not findings["NetworkPolicy"].ok
    assert "NOT enforced" in findings["NetworkPolicy"].detail
    assert report(list(findings.values()), "the default install", as_json=False)[1] == 0


def test_an_older_server_without_admission_policies_is_told_what_is_missing() -> None:
    finding = looked_at(RecordedCluster(has_policies=False))["admission policy"]
    assert (finding.ok, finding.known, finding.needed) == (False, True, False)
    assert "1.30" in finding.fix


@pytest.mark.parametrize(
    ("refused", "name", "needed"),
    [
        ("version", "API server", True),
        ("runtime_classes", "RuntimeClass", True),
        ("storage_classes", "storage", True),
        ("nodes", "room", True),
        ("requested", "room", True),
        ("nodes", "GPUs", False),
        ("has_resource", "Prometheus operator", False),
        ("has_resource", "admission policy", False),
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
    for name in ("gVisor pod", "NetworkPolicy", "PodSecurity"):
        assert (findings[name].ok, findings[name].known) == (False, False)
        assert str(error) in findings[name].detail


@pytest.mark.parametrize(
    ("judge", "tried"),
    [
        (doctor.judge_kernel, TrialResult(kernel_problem="the pod look cannot start: ErrImagePull")),
        (doctor.judge_policy, TrialResult(policy_problem="waited 60 s for the address of the pod listener")),
        (doctor.judge_pod_security, TrialResult(restricted_problem="cannot create pods: 500")),
    ],
)
def test_a_pod_that_did_not_start_says_why(judge: Callable[[TrialResult], Finding], tried: TrialResult) -> None:
    finding = judge(tried)
    problem = tried.kernel_problem or tried.policy_problem or tried.restricted_problem
    assert (finding.ok, finding.detail) == (False, problem)


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
    assert done.returncode == 1
    if kubeconfig.startswith("/nowhere"):
        assert done.stderr.startswith("nouscoder: no cluster is configured: set KUBECONFIG")
        assert done.stderr.count("\n") == 1
    else:
        (finding,) = json.loads(done.stdout)["findings"]
        assert finding["name"] == "API server"
        assert "does not answer" in finding["detail"]
