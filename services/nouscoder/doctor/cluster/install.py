"""`nouscoder doctor --cluster --values FILE`: whether a cluster would admit and run the pods of an install.

`helm install --dry-run=server` tries the objects of the install, but not the pods that they make, and it knows nothing
of nodes, classes and volumes. Nothing in the cluster is changed: each pod is a dry run of the server.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from nouscoder.config import Config
from nouscoder.config.tree import sentences
from nouscoder.doctor import Finding, report
from nouscoder.doctor.cluster.client import (
    Amount,
    Cluster,
    ClusterError,
    Document,
    Node,
    PodRefused,
    connect,
    lacks,
    requests_of,
    shown,
)
from nouscoder.doctor.cluster.judge import storage_words, unknown
from nouscoder.errors import NousCoderError

# The objects of the release as Helm renders them, and the pods that they make. Sends no request to a cluster.

_RENDER_LIMIT_S = 60.0
_HOOK = "helm.sh/hook"
_SANDBOX_VERSION = "v1beta1"
_SANDBOX_KINDS = (
    "sandboxes.agents.x-k8s.io",
    *(f"sandbox{kind}.extensions.agents.x-k8s.io" for kind in ("claims", "templates", "warmpools")),
)
_LEADER = "a3317529.agent-sandbox.x-k8s.io"  # the Lease of the controller that leads
_LEADER_LIMIT = timedelta(minutes=5)  # it is renewed every few seconds, but clocks differ
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


# Its pods on the nodes of the cluster.

_LARGER = "a larger node or one more, or lower requests (the *.resources.requests of the chart's values)"


def _may_use(pod: PlannedPod, node: Node) -> bool:
    """Whether the node's state, labels and taints admit the pod."""
    spec = pod.document["spec"]
    labelled = all(node.labels.get(key) == value for key, value in (spec.get("nodeSelector") or {}).items())
    tolerations = spec.get("tolerations") or ()
    return node.open and labelled and all(any(_tolerates(t, taint) for t in tolerations) for taint in node.taints)


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    same_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint["value"]
    return toleration["key"] == taint["key"] and same_value


def judge_nodes(pods: Sequence[PlannedPod], nodes: Sequence[Node]) -> list[Finding]:
    """A finding for each pod that no node could hold even if it were empty; else one for the largest pod."""
    nowhere: dict[str, list[str]] = {}
    findings = []
    for pod in pods:
        usable = [node for node in nodes if _may_use(pod, node)]
        if not usable:
            selector = pod.document["spec"].get("nodeSelector") or {}
            wanted = ", ".join(f"{key}={value}" for key, value in selector.items())
            nowhere.setdefault(f"is ready{wanted and f', has the labels {wanted}'}", []).append(pod.maker)
        elif all(lacks(node.allocatable, pod.asks) for node in usable):
            findings.append(_too_small(pod, usable))
    for needed, makers in nowhere.items():
        detail = f"none of {len(nodes)} nodes {needed} and admits by its taints: {', '.join(makers)}"
        fix = "kubectl get nodes; nodes that are ready, or the nodeSelector and tolerations of the chart's values"
        findings.append(Finding("nodes", False, True, detail, fix))
    if not findings and pods:
        largest = max(pods, key=lambda pod: _size(pod.asks))
        findings.append(
            Finding("nodes", True, True, f"one can hold the largest pod, {largest.maker}: {shown(largest.asks)}")
        )
    return findings


def _too_small(pod: PlannedPod, usable: Sequence[Node]) -> Finding:
    best = min(usable, key=lambda node: (len(lacks(node.allocatable, pod.asks)), -node.allocatable["memory"]))
    lacking = lacks(best.allocatable, pod.asks)
    devices = [name for name in lacking if "/" in name]
    fixes = [f"nodes whose device plugin offers {', '.join(devices)}"] if devices else []
    fix = ", and ".join(fixes + ([_LARGER] if len(devices) < len(lacking) else []))
    detail = (
        f"it asks for {shown(pod.asks)}; {best.name} has too little of {', '.join(lacking)}: {shown(best.allocatable)}"
    )
    return Finding(f"a node for {pod.maker}", False, True, detail, fix)


def judge_free(pods: Sequence[PlannedPod], nodes: Sequence[Node], requested: Mapping[str, Amount]) -> Finding:
    """Whether all pods fit together into what is not requested yet: first fit, largest pod first."""
    free = {node.name: node.allocatable - requested.get(node.name, Amount()) for node in nodes}
    ask = sum((pod.asks for pod in pods for _ in range(pod.count)), Amount())
    detail = f"the install requests {shown(ask)}"
    for pod in sorted(pods, key=lambda pod: _size(pod.asks), reverse=True):
        usable = [node.name for node in nodes if _may_use(pod, node)]
        for number in range(pod.count):
            place = next((name for name in usable if not lacks(free[name], pod.asks)), None)
            if place is None:
                only = f"only {number} of {pod.count} pods of {pod.maker} find a node with {shown(pod.asks)} free"
                return Finding("room", False, True, f"{detail}, but {only}", _LARGER)
            free[place] = free[place] - pod.asks
    return Finding("room", True, True, f"{detail}, which is free")


def _size(asks: Amount) -> tuple[int, int, int]:
    return sum(number for name, number in asks.items() if "/" in name), asks["memory"], asks["cpu"]


# The first part of a refusal that matches says what to do. {namespace} is that of the pod.
_FIXES: Sequence[tuple[str, str]] = (
    (
        r"violates PodSecurity",
        "change the securityContext values that the message names, or label the namespace with a standard that admits"
        " the pod: kubectl label --overwrite namespace {namespace} pod-security.kubernetes.io/enforce=LEVEL",
    ),
    (r"(exceeded|failed) quota", "change that quota in {namespace}, or the *.resources of the pod in the values"),
    (r"(maximum|minimum) .*usage|must be less than", "change the *.resources, or the LimitRange of {namespace}"),
    (r"RuntimeClass .*not found|pod rejected: RuntimeClass", "make that RuntimeClass, or change runtimeClassName"),
    (r"[Ss]ervice ?[Aa]ccount .*not found", "make that account, or set serviceAccount.create=true for the component"),
    (r"namespaces? .*not found", "kubectl create namespace {namespace}"),
)
_OF_RUNNERS = ("ValidatingAdmissionPolicy", "ResourceQuota")  # what the release has for them
_PLAIN = "change the value that this message is about, or ask the owner of that policy or of the cluster"


def run_doctor_install(release: Release, *, as_json: bool) -> tuple[str, int]:
    """(text to print, exit code). The exit code is 0 when the install can run. Raises ClusterError: no cluster."""
    findings = examine_install(Cluster(connect()), release)
    return report(findings, f"release {release.name} in {release.namespace}", as_json=as_json)


@dataclass
class Install:
    """An install that is examined. `admitted` are the pods as the cluster would store them, by their maker."""

    cluster: Cluster
    release: str
    objects: list[Document]
    pods: list[PlannedPod]
    admitted: dict[str, Document] = field(default_factory=dict)


def examine_install(
    cluster: Cluster, release: Release, renders: Callable[[Release, str], list[Document]] = render
) -> list[Finding]:
    """All findings, in the order in which one would mend them. Stops early when nothing can be asked or rendered."""
    try:
        version = cluster.version()
        objects = renders(release, version)
    except ClusterError as error:
        return [unknown("API server", True, error, "check KUBECONFIG, and kubectl version")]
    except RenderError as error:
        return [Finding("chart", False, True, str(error), error.fix)]
    install = Install(cluster, release.name, objects, planned_pods(objects))
    findings = [Finding("chart", True, True, f"{len(objects)} objects, {len(install.pods)} kinds of pods")]
    try:
        renders(release, "")
    except RenderError as error:
        detail, fix = str(error), error.fix
        if unasked := "is forbidden: User" in detail:
            detail = f"unknown: {detail.rpartition('error calling lookup: ')[2]}"
            fix = "ask the cluster's administrator for the right that this message names"
        findings.append(Finding("values in this cluster", False, True, detail, fix, known=not unasked))
    for examine in (_configuration, _pods, _classes, _agent_sandbox, _storage, _room):
        try:
            findings.extend(examine(install))
        except ClusterError as error:
            findings.append(unknown(examine.__name__.strip("_"), True, error))
    return findings


def fix_for(message: str, namespace: str) -> str:
    """What to change, for a refusal of the API server."""
    fix = next((fix for pattern, fix in _FIXES if re.search(pattern, message)), _PLAIN)
    return fix.format(namespace=namespace)


def _pods(install: Install) -> Iterator[Finding]:
    made = {one["metadata"]["name"] for one in install.objects if one["kind"] == "Namespace"}
    accounts = {one["metadata"]["name"] for one in install.objects if one["kind"] == "ServiceAccount"}
    tried = len(install.pods)
    for pod in install.pods:
        name, namespace = f"pod of {pod.maker}", pod.namespace
        try:
            install.admitted[pod.maker] = install.cluster.dry_run(_with_account(pod.document, accounts), namespace)
        except PodRefused as refused:
            absent = namespace in made and re.search(r"namespaces? .*not found", str(refused))
            if why := f"the install makes the namespace {namespace}" if absent else _of_now(install, pod, str(refused)):
                tried -= 1
                fix = "run this again after the install; the other findings of this pod count already"
                yield Finding(name, False, False, why, fix, known=False)
            else:
                yield Finding(name, False, True, f"refused: {refused}", fix_for(str(refused), namespace))
        except ClusterError as error:
            yield unknown(name, True, error, "ask the owner of that webhook or API, because an install asks it too")
    if tried == len(install.admitted):
        yield Finding("pods", True, True, f"{tried} of {tried} are admitted")


def _of_now(install: Install, pod: PlannedPod, refusal: str) -> str:
    """What of the release refuses the new pod, admits that of now, and is changed by the upgrade; else ""."""
    by = re.search(r"(?:ValidatingAdmissionPolicy '|exceeded quota: )([\w.-]+)", refusal)
    own = [one["metadata"]["name"] for one in install.objects if one["kind"] in _OF_RUNNERS]
    made_by = [one for one in install.objects if pod.maker in (each.maker for each in planned_pods([one]))]
    if not by or by[1] not in own or (there := install.cluster.stored(made_by[0])) is None:
        return ""
    with suppress(PodRefused):
        for each in planned_pods([there]):
            install.cluster.dry_run(each.document, each.namespace)
        return f"{by[1]} of the release that is here admits only its pods, and the upgrade changes it too"
    return ""


def _with_account(pod: Document, accounts: set[str]) -> Document:
    """The pod with the account `default` in place of one that the install makes, which a dry run might not find."""
    if pod["spec"].get("serviceAccountName") not in accounts:
        return pod
    return {**pod, "spec": {**pod["spec"], "serviceAccountName": "default"}}


def _configuration(install: Install) -> Iterator[Finding]:
    """What the services would refuse at their start. An unknown key may be one of a newer chart."""
    for one in install.objects:
        if text := (one.get("data") or {}).get("config.json"):
            try:
                Config.model_validate(json.loads(text))
            except ValidationError as error:
                known = all(fault["type"] != "extra_forbidden" for fault in error.errors())
                detail, fix = (
                    "; ".join(sentences(error, Config)),
                    "change the value of `config` that this message names",
                )
                yield Finding("configuration", False, known, detail, fix, known=known)


def _classes(install: Install) -> Iterator[Finding]:
    wanted: dict[str, list[str]] = {}
    for pod in install.pods:
        if name := pod.document["spec"].get("runtimeClassName"):
            wanted.setdefault(name, []).append(pod.maker)
    there = install.cluster.runtime_classes() if wanted else {}
    for name, makers in wanted.items():
        if name in there:
            yield Finding(f"RuntimeClass {name}", True, True, f"handler {there[name]}, for {', '.join(makers)}")
        else:
            detail = f"it does not exist; there are: {', '.join(sorted(there)) or 'none'}"
            fix = f"make it, or change runtimeClassName in the values, for {', '.join(makers)}"
            yield Finding(f"RuntimeClass {name}", False, True, detail, fix)


def _agent_sandbox(install: Install) -> Iterator[Finding]:
    """The kinds and the controller of agent-sandbox, if the verifiers claim their runners."""
    if not any(one["kind"] == "SandboxWarmPool" for one in install.objects):
        return
    fix = "install agent-sandbox (kubernetes-sigs) with its extensions, or set verifier.sandbox.pool.source=pods"
    there = install.cluster.objects("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    served = {
        one["metadata"]["name"]
        for one in there
        if any(version["name"] == _SANDBOX_VERSION and version["served"] for version in one["spec"]["versions"])
    }
    if missing := [name for name in _SANDBOX_KINDS if name not in served]:
        detail = f"the cluster does not have these kinds in {_SANDBOX_VERSION}: {', '.join(missing)}"
        yield Finding("agent-sandbox", False, True, detail, fix)
        return
    yield Finding("agent-sandbox", True, True, f"its kinds are served in {_SANDBOX_VERSION}")
    name = "controller of agent-sandbox"
    leases = install.cluster.objects("/apis/coordination.k8s.io/v1/leases", field_selector=f"metadata.name={_LEADER}")
    renewed = [datetime.fromisoformat(one["spec"]["renewTime"]) for one in leases if one["spec"].get("renewTime")]
    if not renewed:
        detail = f"nobody has the Lease {_LEADER}, so it does not run, or runs without leader election"
        yield Finding(name, False, True, detail, fix, known=False)
    elif (age := datetime.now(UTC) - max(renewed)) > _LEADER_LIMIT:
        detail = f"it does not run: it renewed its Lease {_LEADER} {age.total_seconds() / 60:.0f} minutes ago"
        yield Finding(name, False, True, detail, "start it, and look at its log")
    else:
        yield Finding(name, True, True, "it runs; the API does not tell whether with --extensions, which claims need")


def _storage(install: Install) -> Iterator[Finding]:
    claims = [one for one in install.objects if one["kind"] == "PersistentVolumeClaim"]
    classes = {one.name: one for one in install.cluster.storage_classes()} if claims else {}
    default = next((one for one in classes.values() if one.is_default), None)
    for one in claims:
        name, spec = name_of(one), one["spec"]
        wanted, modes = spec.get("storageClassName"), ", ".join(spec["accessModes"])
        known = classes.get(wanted) if wanted else default
        if known is None:
            detail = f"no StorageClass {wanted}" if wanted else "no StorageClass is named, and none is the default"
            fix = f"set persistence.storageClass to one of: {', '.join(classes) or 'none is there'}, or make one"
            yield Finding(name, False, True, detail, fix)
        elif {"ReadWriteMany", "ReadOnlyMany"} & set(spec["accessModes"]) and "RWX" not in storage_words(known):
            fix = "a StorageClass whose volumes several nodes mount, or persistence.accessModes=[ReadWriteOnce]"
            detail = f"{modes} of {storage_words(known)}: the API does not tell whether it has that mode"
            yield Finding(name, False, True, detail, fix, known=False)
        else:
            yield Finding(name, True, True, f"{modes} of {storage_words(known)}")


def _room(install: Install) -> Iterator[Finding]:
    # As the cluster would store them, with the defaults of a LimitRange.
    pods = [replace(pod, document=install.admitted.get(pod.maker, pod.document)) for pod in install.pods]
    nodes = install.cluster.nodes()
    found = judge_nodes(pods, nodes)
    yield from found
    if all(finding.ok for finding in found):
        yield judge_free(pods, nodes, install.cluster.requested(besides=install.release))
