"""The objects of a release as Helm renders them, and the pods that they make. Sends no request to a cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from nouscoder.doctor.cluster.client import Amount, Document, requests_of
from nouscoder.errors import NousCoderError

_RENDER_LIMIT_S = 60.0
_HOOK = "helm.sh/hook"
SANDBOX_VERSION = "v1beta1"
SANDBOX_KINDS = (
    "sandboxes.agents.x-k8s.io",
    *(f"sandbox{kind}.extensions.agents.x-k8s.io" for kind in ("claims", "templates", "warmpools")),
)
LEADER = "a3317529.agent-sandbox.x-k8s.io"  # the Lease of the controller that leads
LEADER_LIMIT = timedelta(minutes=5)  # it is renewed every few seconds, but clocks differ
_WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")


class RenderError(NousCoderError):
    """Helm cannot render the chart. `fix` says what to change."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Release:
    """What `helm install RELEASE CHART -n NAMESPACE -f VALUES...` would install."""

    name: str
    namespace: str
    chart: Path
    values: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class PlannedPod:
    """A pod of the release: the object that makes it, and how many there are at once; 0 of a hook, which ends."""

    maker: str
    namespace: str
    count: int
    document: Document

    @property
    def asks(self) -> Amount:
        """What the scheduler finds room for."""
        return requests_of(self.document["spec"])


def render(release: Release, version: str) -> list[Document]:
    """The objects of the release, with namespaces, for a cluster of this version. Raises RenderError.

    Without a version Helm asks the cluster, also for what the chart compares with the release that is there.
    """
    helm = shutil.which("helm")
    if helm is None:
        raise RenderError("helm is not on PATH", "install Helm 3.14 or newer, which the install needs too")
    if not release.chart.exists():
        raise RenderError(f"there is no chart {release.chart}", "run this in a checkout, or name it with --chart")
    files = [option for path in release.values for option in ("--values", str(path))]
    command = [helm, "template", release.name, str(release.chart), "--namespace", release.namespace, *files]
    command += ["--kube-version", version] if version else ["--dry-run=server"]
    limits: dict[str, Any] = {"timeout": _RENDER_LIMIT_S, "check": False, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **limits)
    except subprocess.TimeoutExpired:
        raise RenderError(f"helm template did not end within {_RENDER_LIMIT_S:.0f} s", "run it by hand") from None
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("Error: ")
        raise RenderError(f"helm refuses the values: {said}", "change the value that this message names")
    return read_objects(done.stdout, release.namespace)


def read_objects(text: str, namespace: str) -> list[Document]:
    """The objects in rendered YAML. One without a namespace gets that of the release."""
    found = []
    for one in yaml.load_all(text, yaml.CSafeLoader):
        if one:
            one["metadata"].setdefault("namespace", namespace)
            found.append(one)
    return found


def name_of(document: Document) -> str:
    """KIND/NAME."""
    return f"{document['kind']}/{document['metadata']['name']}"


def planned_pods(objects: Sequence[Document]) -> list[PlannedPod]:
    """The pods that the objects make, with the runners that the verifiers make from their template."""
    warm = [one["spec"]["replicas"] for one in objects if one["kind"] == "SandboxWarmPool"]
    runners = _runners(objects) + sum(warm)
    found = []
    for document in objects:
        template = (document.get("data") or {}).get("runner-pod.json") if document["kind"] == "ConfigMap" else None
        if template is not None:
            pod = json.loads(template)
            found.append(_planned("runner of the verifier", pod["metadata"]["namespace"], runners, pod))
            continue
        metadata = document["metadata"]
        is_hook = _HOOK in (metadata.get("annotations") or {})  # such as the pod of `helm test`
        for end, count, pod in _templates(document):
            count = runners if document["kind"] == "SandboxTemplate" else count
            found.append(_planned(f"{name_of(document)}{end}", metadata["namespace"], 0 if is_hook else count, pod))
    return found


def _planned(maker: str, namespace: str, count: int, pod: Mapping[str, Any]) -> PlannedPod:
    metadata = {key: value for key, value in (pod.get("metadata") or {}).items() if key in ("labels", "annotations")}
    name = maker.rpartition("/")[2].partition(" ")[0]
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": pod["spec"]}
    return PlannedPod(maker, namespace, count, document)


def _templates(document: Document) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """(end of the maker's name, count, pod) of every pod that an object of Kubernetes or an operator makes."""
    kind, spec = document["kind"], document.get("spec") or {}
    if kind == "Pod":
        yield "", 1, document
    elif kind in _WORKLOADS:
        yield "", int(spec.get("replicas", spec.get("parallelism", 1))), spec["template"]
    elif kind == "CronJob":
        yield "", 1, spec["jobTemplate"]["spec"]["template"]
    elif kind == "LeaderWorkerSet":
        groups, group = int(spec.get("replicas", 1)), spec["leaderWorkerTemplate"]
        workers = groups * (int(group.get("size", 1)) - 1)
        yield " (leader)", groups, group.get("leaderTemplate") or group["workerTemplate"]
        if workers:
            yield " (workers)", workers, group["workerTemplate"]
    elif kind == "SandboxTemplate":
        yield "", 0, spec["podTemplate"]  # `planned_pods` knows how many
    elif kind == "JobSet":
        for job in spec["replicatedJobs"]:
            template = job["template"]["spec"]
            count = int(job.get("replicas", 1)) * int(template.get("parallelism", 1))
            yield f" ({job['name']})", count, template["template"]


def _runners(objects: Sequence[Document]) -> int:
    """How many runners all verifiers together keep."""
    per_verifier = verifiers = 0
    for document in objects:
        component = (document["metadata"].get("labels") or {}).get("app.kubernetes.io/component")
        if document["kind"] == "Deployment" and component == "verifier":
            verifiers = int(document["spec"].get("replicas", 1))
        if document["kind"] == "ConfigMap" and "config.json" in (document.get("data") or {}):
            sandbox = json.loads(document["data"]["config.json"])["verifier"]["sandbox"]
            per_verifier = int(sandbox.get("slots", 0)) + int(sandbox.get("pool_spares", 0))
    return verifiers * per_verifier
