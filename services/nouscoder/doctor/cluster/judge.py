"""`nouscoder doctor --cluster`: whether a cluster can run the chart's default install, what is missing, how to get it.

The functions here judge facts (`cluster/facts.py`) and the result of a trial (`cluster/trial.py`) and send no requests.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from nouscoder.doctor.cluster.facts import Amount, Cluster, ClusterError, Node, NotAllowed, StorageClass
from nouscoder.doctor.finding import Finding, report
from nouscoder.errors import NousCoderError
from nouscoder.verifier.runner.kernel import why_not_gvisor

if TYPE_CHECKING:
    from nouscoder.doctor.cluster.trial import TrialResult

Facts = TypeVar("Facts")

OLDEST = (1, 29)
RUNTIME_CLASS = "gvisor"
DEFAULT_IMAGE = "localhost/nouscoder-verifier:0.1.0"
PATIENCE_S = 60.0
# The requests of the default install's pods, the largest first. A test compares them with the chart's values.
INSTALL = (
    Amount(0.25, 896 * 1024**2),  # learner, and its run
    Amount(0.2, 512 * 1024**2),  # generation
    Amount(0.15, 192 * 1024**2),  # verifier
    Amount(0.1, 128 * 1024**2),  # broker
    *[Amount(0.1, 128 * 1024**2)] * 3,  # two sandbox runners and a spare one
    Amount(0.05, 64 * 1024**2),  # Redis
)
# Provisioners whose volumes several nodes can mount at once. The API does not report this.
_SHARED = (
    "nfs",
    "efs.csi.aws.com",
    "file.csi.azure.com",
    "filestore.csi.storage.gke.io",
    "cephfs",
    "lustre",
    "longhorn",
)
_NO_GVISOR = "--set verifier.sandbox.backend=local, which isolates less and needs a privileged pod"


def run_doctor_cluster(image: str, *, as_json: bool) -> tuple[str, int]:
    """(text to print, exit code). The exit code is 0 when the default install can run. Takes up to a few minutes.

    Raises ClusterError when no cluster is configured, NousCoderError when the Kubernetes client is not installed.
    """
    with with_kubernetes():
        from nouscoder.doctor.cluster.client import KubernetesCluster, connect
        from nouscoder.doctor.cluster.trial import run_trial
    api = connect()

    def trial(runtime_class: str | None) -> TrialResult:
        with _ended_by_sigterm():
            return run_trial(api, image, runtime_class, PATIENCE_S)

    return report(examine_cluster(KubernetesCluster(api), trial), "the default install", as_json=as_json)


@contextmanager
def with_kubernetes() -> Iterator[None]:
    """Imports that need the extra `cluster`. Raises NousCoderError when it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise NousCoderError(f"{error.name} is not installed: install the project with its extra `cluster`") from None


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit inside the block, so that the trial removes its objects."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def examine_cluster(cluster: Cluster, trial: Callable[[str | None], TrialResult]) -> list[Finding]:
    """All findings, the most important first. Stops after the first one when the API server does not answer."""
    try:
        version = cluster.version()
    except ClusterError as error:
        return [unknown("API server", True, error, "check KUBECONFIG, and kubectl version")]
    findings = [judge_version(version)]
    classes: dict[str, str] = {}

    def runtime_classes() -> dict[str, str]:
        classes.update(cluster.runtime_classes())
        return classes

    findings.append(_judged("RuntimeClass", True, runtime_classes, judge_runtime_classes))
    tried = _try(trial, RUNTIME_CLASS if RUNTIME_CLASS in classes else None)
    if RUNTIME_CLASS in classes:
        findings.append(_of_trial("gVisor pod", True, tried, judge_kernel))
    findings.append(_judged("storage", True, cluster.storage_classes, judge_storage))
    findings.append(_judged("room", True, lambda: (cluster.nodes(), cluster.requested()), judge_room))
    findings.append(_of_trial("NetworkPolicy", False, tried, judge_policy))
    findings.append(_of_trial("PodSecurity", False, tried, judge_pod_security))
    findings.append(_judged("admission policy", False, lambda: cluster.has_resource(POLICIES), judge_admission_policy))
    findings.append(_judged("GPUs", False, cluster.nodes, judge_gpus))
    findings.append(
        _judged("Prometheus operator", False, lambda: cluster.has_resource(OPERATOR_CRD), judge_prometheus_operator)
    )
    return findings


OPERATOR_CRD = "servicemonitors.monitoring.coreos.com"
POLICIES = "validatingadmissionpolicies.admissionregistration.k8s.io"


def judge_version(version: str) -> Finding:
    """Judge the version that the server reports."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    oldest = ".".join(map(str, OLDEST))
    if match is None or (int(match[1]), int(match[2])) < OLDEST:
        return Finding("API server", False, True, version, f"Kubernetes {oldest} or newer (gRPC probes, PodSecurity)")
    return Finding("API server", True, True, f"{version} answers")


def judge_runtime_classes(classes: dict[str, str]) -> Finding:
    """Judge the RuntimeClasses: handler by name."""
    if RUNTIME_CLASS in classes:
        return Finding("RuntimeClass", True, True, f"{RUNTIME_CLASS}, handler {classes[RUNTIME_CLASS]}")
    others = f"; there are: {', '.join(sorted(classes))}" if classes else ""
    fix = (
        f"install gVisor on the nodes and make the RuntimeClass {RUNTIME_CLASS}, or give the name of yours with --set"
        f" verifier.sandbox.runtimeClassName=NAME, or {_NO_GVISOR}"
    )
    return Finding("RuntimeClass", False, True, f"no {RUNTIME_CLASS}{others}", fix)


def judge_kernel(tried: TrialResult) -> Finding:
    """Judge the kernel of the trial pod, as a verifier judges that of each runner."""
    fix = f"check containerd on the nodes: the handler must be runsc; or {_NO_GVISOR}"
    if tried.kernel_problem:
        return Finding("gVisor pod", False, True, tried.kernel_problem, f"{fix}; for another image: --image NAME")
    if reason := why_not_gvisor(tried.kernel):
        return Finding("gVisor pod", False, True, f"started, but not on gVisor's kernel: {reason}", fix)
    version = str(tried.kernel and tried.kernel.get("version")).partition(" #")[0]
    return Finding("gVisor pod", True, True, f"started, on {version}, which is gVisor's")


def judge_storage(classes: Sequence[StorageClass]) -> Finding:
    """Judge the storage classes. The install uses the default class."""
    listed = ", ".join(storage_words(one) for one in classes) or "none"
    if any(one.is_default for one in classes):
        return Finding("storage", True, True, listed)
    fix = (
        "kubectl annotate storageclass NAME storageclass.kubernetes.io/is-default-class=true, or give one with --set"
        " learner.persistence.storageClass=NAME,problems.persistence.storageClass=NAME"
        ",redis.persistence.storageClass=NAME"
    )
    if not classes:
        fix = "install a provisioner of volumes and make its StorageClass the default"
    return Finding("storage", False, True, f"no default among: {listed}", fix)


def storage_words(one: StorageClass) -> str:
    """A StorageClass in words: provisioner, and access modes as far as known."""
    shared = any(word in one.provisioner for word in _SHARED)
    modes = "RWO and RWX" if shared else "RWO"
    seen = sorted(one.access_modes - {"ReadWriteOnce"})
    used = f", in use: {', '.join(seen)}" if seen else ""
    return f"{one.name}{' (default)' if one.is_default else ''} by {one.provisioner}, {modes} as far as known{used}"


def judge_room(facts: tuple[Sequence[Node], dict[str, Amount]]) -> Finding:
    """Judge the free resources: first fit, largest pod first, into what is not requested yet."""
    nodes, requested = facts
    free = [
        node.allocatable - requested.get(node.name, Amount(0, 0)) for node in nodes if node.open and not node.taints
    ]
    total = sum(free, Amount(0, 0))
    ask = sum(INSTALL, Amount(0, 0))
    detail = f"{total} free on {len(free)} nodes, the default install requests {ask}"
    for pod in INSTALL:
        place = next((index for index, room in enumerate(free) if room.holds(pod)), None)
        if place is None:
            fix = "a larger node or one more, or lower requests (the *.resources.requests of the chart's values)"
            return Finding("room", False, True, f"{detail}; no node has room for a pod of {pod}", fix)
        free[place] = free[place] - pod
    return Finding("room", True, True, detail)


def judge_policy(tried: TrialResult) -> Finding:
    """Judge whether the cluster enforces NetworkPolicies."""
    if tried.policy_enforced is None:
        return Finding("NetworkPolicy", False, False, tried.policy_problem, "for another image: --image NAME", False)
    if tried.policy_enforced:
        return Finding("NetworkPolicy", True, False, "enforced: a pod that could connect no longer could")
    fix = "a network plugin that enforces NetworkPolicy; until then any pod can reach the services"
    return Finding("NetworkPolicy", False, False, "recorded but NOT enforced: a denied pod went on connecting", fix)


def judge_pod_security(tried: TrialResult) -> Finding:
    """Judge whether a namespace label makes the API server refuse privileged pods."""
    if tried.restricted_refuses is None:
        return Finding("PodSecurity", False, False, tried.restricted_problem, known=False)
    if tried.restricted_refuses:
        detail = "on: a privileged pod is refused in a restricted namespace"
        return Finding("PodSecurity", True, False, detail)
    fix = "turn the admission plugin PodSecurity on: it is by default"
    return Finding(
        "PodSecurity", False, False, "off: a privileged pod would be accepted in a restricted namespace", fix
    )


def judge_admission_policy(there: bool) -> Finding:
    """Judge whether the API server can refuse pods that are not runners in the namespace of the runners."""
    if there:
        detail = "ValidatingAdmissionPolicy is there: only runners are admitted to their namespace"
        return Finding("admission policy", True, False, detail)
    fix = (
        "Kubernetes 1.30 or newer, or a policy engine of yours; until then the verifier's token can make any pod in the"
        " namespace of the runners"
    )
    return Finding("admission policy", False, False, "no ValidatingAdmissionPolicy", fix)


def judge_gpus(nodes: Sequence[Node]) -> Finding:
    """Judge the GPUs of each node, as its device plugin reports them."""
    numbers = {node.name: node.allocatable.devices.get("nvidia.com/gpu", 0) for node in nodes}
    gpus = [f"{name}: {number}" for name, number in numbers.items() if number]
    if gpus:
        return Finding("GPUs", True, False, f"nvidia.com/gpu allocatable, {', '.join(gpus)}")
    fix = "GPU nodes with the NVIDIA device plugin; the default install needs none, values-gpu.yaml does"
    return Finding("GPUs", False, False, f"no nvidia.com/gpu on {len(nodes)} nodes", fix)


def judge_prometheus_operator(there: bool) -> Finding:
    """Judge whether the Prometheus operator is installed, by its CustomResourceDefinition."""
    if there:
        return Finding("Prometheus operator", True, False, f"{OPERATOR_CRD}: set serviceMonitor.enabled=true")
    fix = "the Prometheus operator; without it scrape pods by their annotations prometheus.io/*"
    return Finding("Prometheus operator", False, False, f"no {OPERATOR_CRD}", fix)


def _judged(name: str, needed: bool, read: Callable[[], Facts], judge: Callable[[Facts], Finding]) -> Finding:
    try:
        return judge(read())
    except ClusterError as error:
        return unknown(name, needed, error)


def unknown(name: str, needed: bool, error: ClusterError, fix: str = "") -> Finding:
    """A finding that could not be made, because the account may not ask or the cluster did not answer."""
    if isinstance(error, NotAllowed):
        fix = "ask the cluster's administrator for that right, or to run this command"
    return Finding(name, False, needed, f"unknown: {error}", fix, known=False)


def _try(trial: Callable[[str | None], TrialResult], runtime_class: str | None) -> TrialResult | ClusterError:
    try:
        return trial(runtime_class)
    except ClusterError as error:
        return error


def _of_trial(
    name: str, needed: bool, tried: TrialResult | ClusterError, judge: Callable[[TrialResult], Finding]
) -> Finding:
    return unknown(name, needed, tried) if isinstance(tried, ClusterError) else judge(tried)
