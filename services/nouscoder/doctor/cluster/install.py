"""`nouscoder doctor --cluster --values FILE`: whether a cluster would admit and run the pods of an install.

`helm install --dry-run=server` tries the objects of the install, but not the pods that they make, and it knows nothing
of nodes, classes and volumes. Nothing in the cluster is changed: each pod is a dry run of the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pydantic import ValidationError

from nouscoder.config import Config
from nouscoder.config.tree import sentences
from nouscoder.doctor import Finding, report
from nouscoder.doctor.cluster.client import Cluster, ClusterError, Document, PodRefused, connect
from nouscoder.doctor.cluster.judge import storage_words, unknown
from nouscoder.doctor.cluster.nodes import judge_free, judge_nodes
from nouscoder.doctor.cluster.rendered import (
    LEADER,
    LEADER_LIMIT,
    SANDBOX_KINDS,
    SANDBOX_VERSION,
    PlannedPod,
    Release,
    RenderError,
    name_of,
    planned_pods,
    render,
)

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
        if any(version["name"] == SANDBOX_VERSION and version["served"] for version in one["spec"]["versions"])
    }
    if missing := [name for name in SANDBOX_KINDS if name not in served]:
        detail = f"the cluster does not have these kinds in {SANDBOX_VERSION}: {', '.join(missing)}"
        yield Finding("agent-sandbox", False, True, detail, fix)
        return
    yield Finding("agent-sandbox", True, True, f"its kinds are served in {SANDBOX_VERSION}")
    name = "controller of agent-sandbox"
    leases = install.cluster.objects("/apis/coordination.k8s.io/v1/leases", field_selector=f"metadata.name={LEADER}")
    renewed = [datetime.fromisoformat(one["spec"]["renewTime"]) for one in leases if one["spec"].get("renewTime")]
    if not renewed:
        detail = f"nobody has the Lease {LEADER}, so it does not run, or runs without leader election"
        yield Finding(name, False, True, detail, fix, known=False)
    elif (age := datetime.now(UTC) - max(renewed)) > LEADER_LIMIT:
        detail = f"it does not run: it renewed its Lease {LEADER} {age.total_seconds() / 60:.0f} minutes ago"
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
