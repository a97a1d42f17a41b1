"""The objects of a release as Helm renders them, and the pods that they make. Sends no request to a cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nouscoder.doctor.cluster.client import Amount, Document, requests_of
from nouscoder.errors import NousCoderError

_RENDER_LIMIT_S = 60.0
_HOOK = "helm.sh/hook"
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
    """A pod of the release. `maker` is the object that makes it, `count` how many there are at the same time.

    `count` is 0 for the pod of a hook, which ends.
    """

    maker: str
    namespace: str
    count: int
    document: Document

    @property
    def asks(self) -> Amount:
        """What the scheduler finds room for."""
        return requests_of(self.document["spec"])


def render(release: Release, version: str) -> list[Document]:
    """Every object of the release for a cluster of this version, with its namespace. Asks no cluster.

    Raises RenderError when Helm is missing, or refuses the values.
    """
    helm = shutil.which("helm")
    if helm is None:
        raise RenderError("helm is not on PATH", "install Helm 3.14 or newer, which the install needs too")
    if not release.chart.exists():
        raise RenderError(f"there is no chart {release.chart}", "run this in a checkout, or name it with --chart")
    files = [option for path in release.values for option in ("--values", str(path))]
    command = [helm, "template", release.name, str(release.chart), "--namespace", release.namespace, *files]
    command += ["--kube-version", version]
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


def is_hook(document: Document) -> bool:
    """Whether Helm makes the object for a hook, such as the pod of `helm test`."""
    return _HOOK in (document["metadata"].get("annotations") or {})


def name_of(document: Document) -> str:
    """KIND/NAME."""
    return f"{document['kind']}/{document['metadata']['name']}"


def planned_pods(objects: Sequence[Document]) -> list[PlannedPod]:
    """The pods that the objects make, with the runners that the verifiers make from their template."""
    runners = _runners(objects)
    found = []
    for document in objects:
        template = (document.get("data") or {}).get("runner-pod.json") if document["kind"] == "ConfigMap" else None
        if template is not None:
            pod = json.loads(template)
            found.append(_planned("runner of the verifier", pod["metadata"]["namespace"], runners, pod))
            continue
        for end, count, pod in _templates(document):
            maker = f"{name_of(document)}{end}"
            found.append(_planned(maker, document["metadata"]["namespace"], 0 if is_hook(document) else count, pod))
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
    elif kind == "LeaderWorkerSet":
        groups, group = int(spec.get("replicas", 1)), spec["leaderWorkerTemplate"]
        workers = groups * (int(group.get("size", 1)) - 1)
        yield " (leader)", groups, group.get("leaderTemplate") or group["workerTemplate"]
        if workers:
            yield " (workers)", workers, group["workerTemplate"]
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
