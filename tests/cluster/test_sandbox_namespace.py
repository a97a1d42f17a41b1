"""What the verifier's token can do on a real cluster: make runners in their namespace, and nothing else.

Each attack is a real request with that token. The pod of the chart's own template, unchanged, is admitted.
"""

from __future__ import annotations

import copy
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

HIGH_CLASS = "nouscoder-test-high"  # as a company's own, above the pods of the release
Pod = dict[str, Any]


@dataclass
class Token:
    """kubectl with the verifier's token, and the pod that the verifier makes."""

    release: Any
    kubeconfig: Path
    template: Pod

    def ask(self, *words: str, given: Any = None) -> tuple[bool, str]:
        """Whether the API server grants a request, and what it says."""
        done = subprocess.run(
            ["kubectl", "--kubeconfig", str(self.kubeconfig), *words],
            input=json.dumps(given) if given is not None else None,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode == 0, (done.stdout + done.stderr).strip()


@pytest.fixture(scope="module")
def high_class(grader: Any) -> Iterator[None]:
    """The PriorityClass HIGH_CLASS: without it Kubernetes itself refuses its name."""
    grader.kubectl("create", "priorityclass", HIGH_CLASS, "--value", "1000000")
    yield
    grader.kubectl("delete", "priorityclass", HIGH_CLASS)


@pytest.fixture(scope="module")
def token(grader: Any, high_class: None, tmp_path_factory: pytest.TempPathFactory) -> Token:
    settings = json.loads(grader.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    settings["users"][0]["user"] = {"token": grader.kubectl("create", "token", "nouscoder-verifier").strip()}
    file = tmp_path_factory.mktemp("token") / "kubeconfig"
    file.write_text(json.dumps(settings))
    data = json.loads(grader.kubectl("get", "configmap", "nouscoder-sandbox", "-o", "json"))["data"]
    return Token(grader, file, json.loads(data["runner-pod.json"]))


def container(pod: Pod) -> dict[str, Any]:
    found: dict[str, Any] = pod["spec"]["containers"][0]
    return found


def volume(pod: Pod, **source: Any) -> None:
    pod["spec"]["volumes"].append({"name": "more", **source})
    container(pod)["volumeMounts"].append({"name": "more", "mountPath": "/more"})


def variable(pod: Pod, **source: Any) -> None:
    container(pod)["env"].append({"name": "MORE", "valueFrom": source})


def probe(pod: Pod, kind: str, **action: Any) -> None:
    container(pod)[kind] = action


ATTACKS: dict[str, Callable[[Pod], Any]] = {
    "hostPath": lambda pod: volume(pod, hostPath={"path": "/"}),
    "Secret volume": lambda pod: volume(pod, secret={"secretName": "nouscoder-sandbox-key"}),
    "ConfigMap volume": lambda pod: volume(pod, configMap={"name": "kube-root-ca.crt"}),
    "token volume": lambda pod: volume(pod, projected={"sources": [{"serviceAccountToken": {"path": "token"}}]}),
    "claim": lambda pod: volume(pod, persistentVolumeClaim={"claimName": "x"}),
    "disk": lambda pod: volume(pod, emptyDir={}),
    "privileged": lambda pod: container(pod)["securityContext"].update(privileged=True, allowPrivilegeEscalation=True),
    "escalation": lambda pod: container(pod)["securityContext"].update(allowPrivilegeEscalation=True),
    "SYS_ADMIN": lambda pod: container(pod)["securityContext"]["capabilities"]["add"].append("SYS_ADMIN"),
    "SYS_CHROOT": lambda pod: container(pod)["securityContext"]["capabilities"]["add"].append("SYS_CHROOT"),
    "NET_ADMIN": lambda pod: container(pod)["securityContext"]["capabilities"]["add"].append("NET_ADMIN"),
    "all capabilities": lambda pod: container(pod)["securityContext"]["capabilities"].update(add=["ALL"]),
    "nothing dropped": lambda pod: container(pod)["securityContext"]["capabilities"].pop("drop"),
    "no context": lambda pod: container(pod).pop("securityContext"),
    "writable root": lambda pod: container(pod)["securityContext"].pop("readOnlyRootFilesystem"),
    "unmasked proc": lambda pod: container(pod)["securityContext"].update(procMount="Unmasked"),
    "seccomp of the pod": lambda pod: pod["spec"]["securityContext"].update(seccompProfile={"type": "Unconfined"}),
    "seccomp": lambda pod: container(pod)["securityContext"].update(seccompProfile={"type": "Unconfined"}),
    "SELinux": lambda pod: pod["spec"]["securityContext"].update(seLinuxOptions={"type": "spc_t"}),
    "AppArmor": lambda pod: container(pod)["securityContext"].update(appArmorProfile={"type": "Unconfined"}),
    "sysctl": lambda pod: pod["spec"]["securityContext"].update(
        sysctls=[{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]
    ),
    "other image": lambda pod: container(pod).update(image="localhost/nouscoder-verifier:0.1.0"),
    "no RuntimeClass": lambda pod: pod["spec"].pop("runtimeClassName"),
    "other RuntimeClass": lambda pod: pod["spec"].update(runtimeClassName="runc"),
    "hostNetwork": lambda pod: pod["spec"].update(hostNetwork=True),
    "hostPID": lambda pod: pod["spec"].update(hostPID=True),
    "hostIPC": lambda pod: pod["spec"].update(hostIPC=True),
    "hostPort": lambda pod: container(pod)["ports"][0].update(hostPort=7070),
    "hostAliases": lambda pod: pod["spec"].update(hostAliases=[{"ip": "10.0.0.1", "hostnames": ["kubernetes"]}]),
    "nodeName": lambda pod: pod["spec"].update(nodeName="node1"),
    "token": lambda pod: pod["spec"].update(automountServiceAccountToken=True),
    "another account": lambda pod: pod["spec"].update(serviceAccountName="nouscoder-verifier"),
    "second container": lambda pod: pod["spec"]["containers"].append({"name": "x", "image": "x"}),
    "init container": lambda pod: pod["spec"].update(initContainers=[{"name": "x", "image": "x"}]),
    "another Secret": lambda pod: variable(pod, secretKeyRef={"name": "registry", "key": "key"}),
    "ConfigMap": lambda pod: variable(pod, configMapKeyRef={"name": "kube-root-ca.crt", "key": "ca.crt"}),
    "envFrom": lambda pod: container(pod).update(envFrom=[{"secretRef": {"name": "registry"}}]),
    "value for a name": lambda pod: container(pod)["env"][0].update(value="0" * 64, valueFrom=None),
    "more time without a verifier": lambda pod: container(pod)["env"][1].update(value="999999"),
    "another variable": lambda pod: container(pod)["env"].append({"name": "LD_PRELOAD", "value": "/tmp/x.so"}),
    "missing variable": lambda pod: container(pod)["env"].pop(),
    "address of the host": lambda pod: variable(pod, fieldRef={"fieldPath": "status.hostIP"}),
    "command": lambda pod: container(pod).update(command=["sh", "-c", "sleep 999"]),
    "arguments": lambda pod: container(pod).update(args=["-c", "x"]),
    "postStart": lambda pod: container(pod).update(lifecycle={"postStart": {"exec": {"command": ["true"]}}}),
    "preStop": lambda pod: container(pod).update(lifecycle={"preStop": {"httpGet": {"host": "10.0.0.1", "port": 80}}}),
    "command of a probe": lambda pod: probe(pod, "livenessProbe", exec={"command": ["true"]}),
    "startup probe": lambda pod: probe(pod, "startupProbe", tcpSocket={"port": "runner"}),
    "HTTP from the node": lambda pod: probe(pod, "livenessProbe", httpGet={"host": "169.254.169.254", "port": 80}),
    "TCP from the node": lambda pod: probe(pod, "livenessProbe", tcpSocket={"host": "10.0.0.1", "port": 22}),
    "host of the readiness probe": lambda pod: container(pod)["readinessProbe"]["tcpSocket"].update(host="10.0.0.1"),
    "port of the readiness probe": lambda pod: container(pod)["readinessProbe"]["tcpSocket"].update(port=22),
    "command of the readiness probe": lambda pod: probe(pod, "readinessProbe", exec={"command": ["true"]}),
    "no readiness probe": lambda pod: container(pod).pop("readinessProbe"),
    "priority of the system": lambda pod: pod["spec"].update(priorityClassName="system-node-critical"),
    "priority": lambda pod: pod["spec"].update(priorityClassName=HIGH_CLASS),
    "device": lambda pod: container(pod)["resources"]["limits"].update({"example.com/kvm": "1"}),
    "no memory limit": lambda pod: container(pod)["resources"].pop("limits"),
    "many cores": lambda pod: container(pod)["resources"]["requests"].update(cpu="64"),
    "cores by a limit": lambda pod: container(pod)["resources"].update(
        limits={"cpu": "64", "memory": "5Gi"}, requests={}
    ),
    "much memory": lambda pod: container(pod)["resources"]["requests"].update(memory="4Gi"),
    "a high memory limit": lambda pod: container(pod)["resources"]["limits"].update(memory="64Gi"),
    "much disk": lambda pod: container(pod)["resources"]["requests"].update({"ephemeral-storage": "500Gi"}),
    "resources of the pod": lambda pod: pod["spec"].update(resources={"requests": {"cpu": "64"}}),
    "a slow end": lambda pod: pod["spec"].update(terminationGracePeriodSeconds=86400),
    "finalizer": lambda pod: pod["metadata"].update(finalizers=["example.com/forever"]),
    "unlabelled": lambda pod: pod["metadata"].pop("labels"),
    "labels of the verifier": lambda pod: pod["metadata"]["labels"].update({"app.kubernetes.io/component": "verifier"}),
}


def test_the_pod_of_the_chart_is_admitted(token: Token) -> None:
    granted, said = token.ask("create", "--dry-run=server", "-f", "-", given=token.template)
    assert granted, said


@pytest.mark.parametrize("name", ATTACKS)
def test_no_other_pod_is_admitted(token: Token, name: str) -> None:
    pod = copy.deepcopy(token.template)
    ATTACKS[name](pod)
    assert pod != token.template
    granted, said = token.ask("create", "-f", "-", given=pod)
    print(f"{name}: {said[:300]}")
    assert not granted, name


def test_the_number_of_pods_is_bounded(token: Token) -> None:
    """A stolen token could fill the nodes, and etcd, with runners."""
    hard = json.loads(token.release.kubectl("get", "quota", "-n", token.release.runners, "-o", "json"))["items"][0]
    most = int(hard["status"]["hard"]["count/pods"])
    assert most == 20 + 3 * (2 + 1)
    lower = ("patch", "quota", "nouscoder-sandbox", "-n", token.release.runners, "-p")
    token.release.kubectl(*lower, json.dumps({"spec": {"hard": {"count/pods": "1"}}}))
    try:
        granted, said = token.ask("create", "--dry-run=server", "-f", "-", given=token.template)
    finally:
        token.release.kubectl(*lower, json.dumps({"spec": {"hard": {"count/pods": str(most)}}}))
    assert not granted
    assert "exceeded quota: nouscoder-sandbox" in said


def test_the_policy_itself_refuses_and_not_only_other_admission(token: Token) -> None:
    """Most attacks are valid pods, so that nothing else refuses them."""
    by_policy = 0
    for attack in ATTACKS.values():
        pod = copy.deepcopy(token.template)
        attack(pod)
        by_policy += "ValidatingAdmissionPolicy" in token.ask("create", "--dry-run=server", "-f", "-", given=pod)[1]
    print(f"{by_policy} of {len(ATTACKS)} requests are refused by the ValidatingAdmissionPolicy")
    assert by_policy >= 40


def test_the_token_opens_no_other_namespace_and_no_other_resource(token: Token) -> None:
    release = token.release
    for namespace in (release.namespace, "default", "kube-system"):
        pod = copy.deepcopy(token.template)
        pod["metadata"]["namespace"] = namespace
        assert "forbidden" in token.ask("create", "-f", "-", given=pod)[1]
        for kind in ("pods", "secrets", "leases"):
            assert "forbidden" in token.ask("get", kind, "-n", namespace)[1]
    for kind in ("secrets", "configmaps", "serviceaccounts", "networkpolicies", "events", "roles"):
        assert "forbidden" in token.ask("get", kind, "-n", release.runners)[1], kind
    runner = release.pod("sandbox").name
    for words in (("exec", runner, "--", "id"), ("logs", runner), ("attach", runner), ("port-forward", runner, "7070")):
        assert "forbidden" in token.ask("-n", release.runners, *words)[1], words
    assert "forbidden" in token.ask("-n", release.runners, "debug", runner, "--image=x", "--attach=false")[1]
    assert "forbidden" in token.ask("create", "token", "default", "-n", release.runners)[1]
    for kind in ("nodes", "namespaces", "validatingadmissionpolicies"):
        assert "forbidden" in token.ask("get", kind)[1], kind


def test_a_living_runner_gets_no_other_image_and_no_other_labels(token: Token) -> None:
    runner = token.release.pod("sandbox").name
    images = {"spec": {"containers": [{"name": "runner", "image": "localhost/nouscoder-verifier:0.1.0"}]}}
    labels = {"metadata": {"labels": {"app.kubernetes.io/component": "verifier"}}}
    for patch in (images, labels):
        granted, said = token.ask("-n", token.release.runners, "patch", "pod", runner, "-p", json.dumps(patch))
        assert not granted
        assert "ValidatingAdmissionPolicy" in said, said


def test_both_namespaces_hold_what_the_readme_says(token: Token) -> None:
    release = token.release
    assert release.kubectl("get", "secrets", "-n", release.runners, "-o", "name").split() == [
        "secret/nouscoder-sandbox-key"
    ]
    labels = json.loads(release.kubectl("get", "namespace", release.runners, "-o", "json"))["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "baseline"
    pod = copy.deepcopy(token.template)
    pod["metadata"]["namespace"] = release.namespace
    done = subprocess.run(
        ["kubectl", "create", "--dry-run=server", "-f", "-"],
        input=json.dumps(pod),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 'violates PodSecurity "restricted' in done.stderr, "also for an administrator"


def test_the_runners_of_a_killed_verifier_are_removed(grader: Any) -> None:
    """Nobody deletes them with the pod: an owner must be in the namespace of its dependents."""
    before = {pod.name for pod in grader.pods() if pod.component == "sandbox"}
    killed = grader.pod("verifier")
    grader.kubectl("delete", "pod", killed.name, "--grace-period=0", "--force", limit_s=120)
    started = time.monotonic()

    def runners() -> set[str]:
        return {pod.name for pod in grader.pods() if pod.component == "sandbox"}

    grader.until(lambda: not runners() & before, "the runners of the killed verifier are gone", 180)
    print(f"{len(before)} runners removed after {time.monotonic() - started:.0f} s")
    leases = grader.kubectl("get", "leases", "-n", grader.runners, "-o", "name").split()
    grader.until(lambda: grader.all_ready({"verifier", "sandbox"}), "the successor is ready", 300)
    assert f"lease.coordination.k8s.io/{killed.name}" not in leases
