"""`nouscoder doctor --cluster`: whether a cluster has what the chart needs of it: gVisor, volumes, policies.

The functions here judge facts (`cluster/client.py`) and the result of a trial: trial pods test what no API object
shows, whether gVisor starts, and whether a NetworkPolicy is enforced.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nouscoder import __version__
from nouscoder.doctor import Finding, report
from nouscoder.doctor.cluster.client import Cluster, ClusterError, NotAllowed, StorageClass, connect
from nouscoder.doctor.cluster.trial import Trial, TrialResult, answer_or_error
from nouscoder.verifier.runner.kernel import why_not_gvisor

RUNTIME_CLASS = "gvisor"
# As published. A version of development, which is not, may have a `+`, which no tag may have.
DEFAULT_IMAGE = f"nouscoder/nouscoder-verifier:{__version__.partition('+')[0]}"
PATIENCE_S = 60.0
# Provisioners whose volumes several nodes can mount at once. The API does not report this.
_SHARED = ("nfs", "efs.csi", "file.csi.azure.com", "filestore.csi.storage.gke.io", "cephfs", "lustre", "longhorn")
_NO_GVISOR = (
    "isolate less: --set verifier.sandbox.backend=userns (needs Kubernetes 1.33 and containerd 2), or"
    " verifier.sandbox.backend=local (needs a privileged pod)"
)


def run_doctor_cluster(image: str, *, as_json: bool) -> tuple[str, int]:
    """(text to print, exit code: 0 when the default install can run), after some minutes. Raises ClusterError."""
    api = connect()

    def trial(runtime_class: str | None) -> TrialResult:
        with _ended_by_sigterm(), Trial(api, image, PATIENCE_S) as running:
            facts = answer_or_error(lambda: running.kernel_of(runtime_class)) if runtime_class else None
            return TrialResult(facts, answer_or_error(running.policy_is_enforced))

    return report(examine_cluster(Cluster(api), trial), "the default install", as_json=as_json)


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
        findings = [Finding("API server", True, True, f"{cluster.version()} answers")]
    except ClusterError as error:
        return [unknown("API server", True, error, "check KUBECONFIG, and kubectl version")]
    classes: dict[str, str] = {}
    try:
        classes = cluster.runtime_classes()
        findings.append(judge_runtime_classes(classes))
    except ClusterError as error:
        findings.append(unknown("RuntimeClass", True, error))
    try:
        tried = trial(RUNTIME_CLASS if RUNTIME_CLASS in classes else None)
    except ClusterError as error:
        tried = TrialResult(error, error)
    if RUNTIME_CLASS in classes:
        findings.append(judge_kernel(tried))
    try:
        findings.append(judge_storage(cluster.storage_classes()))
    except ClusterError as error:
        findings.append(unknown("storage", True, error))
    findings.append(judge_policy(tried))
    return findings


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
    if isinstance(tried.kernel, ClusterError):
        return unknown("gVisor pod", True, tried.kernel, f"{fix}; for another image: --image NAME")
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
    modes = "RWO and RWX" if any(word in one.provisioner for word in _SHARED) else "RWO"
    return f"{one.name}{' (default)' if one.is_default else ''} by {one.provisioner}, {modes} as far as known"


def judge_policy(tried: TrialResult) -> Finding:
    """Judge whether the cluster enforces NetworkPolicies."""
    if isinstance(tried.policy_enforced, ClusterError):
        return unknown("NetworkPolicy", False, tried.policy_enforced, "for another image: --image NAME")
    if tried.policy_enforced:
        return Finding("NetworkPolicy", True, False, "enforced: a pod that could connect no longer could")
    fix = "a network plugin that enforces NetworkPolicy; until then any pod can reach the services"
    return Finding("NetworkPolicy", False, False, "recorded but NOT enforced: a denied pod went on connecting", fix)


def unknown(name: str, needed: bool, error: ClusterError, fix: str = "") -> Finding:
    """A finding that could not be made, because the account may not ask or the cluster did not answer."""
    if isinstance(error, NotAllowed):
        fix = "ask the cluster's administrator for that right, or to run this command"
    return Finding(name, False, needed, f"unknown: {error}", fix, known=False)
