"""`nouscoder doctor --cluster --values FILE`: whether a cluster would admit and run an install with these values.

Nothing in the cluster is changed: every write is a dry run of the server, and nothing is started. The functions here
ask a `Target` and judge its answers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from nouscoder.doctor.cluster.client import connect
from nouscoder.doctor.cluster.facts import ClusterError, NotAllowed
from nouscoder.doctor.cluster.judge import judge_version, storage_words, unknown
from nouscoder.doctor.cluster.needed_objects import missing_objects
from nouscoder.doctor.cluster.places import asked_of_quotas, judge_free, judge_nodes, judge_quota, to_place
from nouscoder.doctor.cluster.redis_facts import RedisFacts, ask_redis, examine_redis
from nouscoder.doctor.cluster.refusals import fix_for, fix_for_kind, plainly
from nouscoder.doctor.cluster.release_objects import (
    PlannedPod,
    Release,
    RenderError,
    is_hook,
    name_of,
    planned_pods,
    render,
)
from nouscoder.doctor.cluster.target import Document, DryRun, Kind, Outcome, Target
from nouscoder.doctor.cluster.target_client import KubernetesTarget
from nouscoder.doctor.finding import Finding, report

# The verb, the resource and the group in a refusal by RBAC.
_DENIED = re.compile(r'cannot (\w+ )resource "([^"]*)"')
_OWNER = "meta.helm.sh/release-name"


def run_doctor_install(release: Release, *, as_json: bool) -> tuple[str, int]:
    """(text to print, exit code). The exit code is 0 when the install can run. Raises ClusterError: no cluster."""
    findings = examine_install(KubernetesTarget(connect()), release)
    return report(findings, f"release {release.name} in {release.namespace}", as_json=as_json)


@dataclass
class Install:
    """An install that is examined. `admitted` are the pods as the cluster would store them, by their maker.

    `denied` are the resources that this account may not make, `absent` the namespaces that do not exist.
    """

    release: Release
    target: Target
    objects: list[Document]
    pods: list[PlannedPod]
    kinds: Mapping[str, Kind]
    absent: set[str] = field(default_factory=set)
    admitted: dict[str, Document] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    there: bool = False


def examine_install(
    target: Target,
    release: Release,
    renders: Callable[[Release, str], list[Document]] = render,
    asks_redis: Callable[[str, str], RedisFacts] = ask_redis,
) -> list[Finding]:
    """All findings, in the order in which one would mend them. Stops early when nothing can be asked or rendered."""
    try:
        version = target.version()
    except ClusterError as error:
        return [unknown("API server", True, error, "check KUBECONFIG, and kubectl version")]
    findings = [judge_version(version)]
    try:
        objects = renders(release, version)
        kinds = target.kinds()
    except RenderError as error:
        return [*findings, Finding("chart", False, True, str(error), error.fix)]
    except ClusterError as error:
        return [*findings, unknown("kinds", True, error)]
    install = Install(release, target, objects, planned_pods(objects), kinds)
    findings.append(Finding("chart", True, True, f"{len(objects)} objects, {len(install.pods)} kinds of pods"))
    for examine in (_kinds, _namespaces, _objects, _pods, _rights, _classes, _storage, _needed, _nodes, _quotas):
        try:
            findings.extend(examine(install))
        except ClusterError as error:
            findings.append(unknown(examine.__name__.strip("_"), True, error))
    return [*findings, *examine_redis(install.pods, objects, target, asks_redis)]


def _kinds(install: Install) -> Iterator[Finding]:
    missing: dict[tuple[str, str], list[str]] = {}
    for one in install.objects:
        if f"{one['apiVersion']}/{one['kind']}" not in install.kinds:
            missing.setdefault((one["apiVersion"], one["kind"]), []).append(one["metadata"]["name"])
    for (api_version, kind), names in missing.items():
        detail = f"this cluster has no kind {kind} of {api_version}, of which the install makes {', '.join(names)}"
        yield Finding(kind, False, True, detail, fix_for_kind(api_version))
    if not missing:
        yield Finding("kinds", True, True, "the API serves every kind of the install")


def _namespaces(install: Install) -> Iterator[Finding]:
    own = install.release.namespace
    made = {one["metadata"]["name"] for one in install.objects if one["kind"] == "Namespace"}
    used = {own, *(pod.namespace for pod in install.pods), *(one["metadata"]["namespace"] for one in install.objects)}
    install.absent = {name for name in used if not install.target.has_namespace(name)}
    for name in sorted(install.absent):
        if name in made:
            detail = "the install makes it, so what goes into it cannot be tried before"
            fix = "run this again after the install; the other findings of these pods count already"
            yield Finding(f"namespace {name}", False, False, detail, fix, known=False)
        else:
            fix = f"kubectl create namespace {name}"
            if name == own:
                fix += f" && kubectl label namespace {name} pod-security.kubernetes.io/enforce=restricted"
            detail = "it does not exist, so nothing that goes into it was tried"
            yield Finding(f"namespace {name}", False, True, detail, fix)
    if own not in install.absent:
        yield Finding(f"namespace {own}", True, True, "it exists")


def _objects(install: Install) -> Iterator[Finding]:
    tried = refused = unknown_ones = 0
    for one in install.objects:
        kind = install.kinds.get(f"{one['apiVersion']}/{one['kind']}")
        if kind is None or one["kind"] == "Pod" or (kind.namespaced and one["metadata"]["namespace"] in install.absent):
            continue
        answer = install.target.dry_run(one, kind, one["metadata"]["namespace"])
        tried += 1
        install.there |= answer.exists and one["kind"] in ("Deployment", "StatefulSet")
        found = list(_of_answer(_named(one, install), answer, one["metadata"]["namespace"], install))
        # Warnings of PodSecurity about the template come again with its pod.
        found = [finding for finding in found if "PodSecurity" not in finding.detail or finding.needed]
        if answer.exists and not is_hook(one):
            found += _of_owner(_named(one, install), answer, install.release)
        refused += any(finding.needed and finding.known for finding in found)
        unknown_ones += answer.outcome in (Outcome.MAY_NOT, Outcome.UNDECIDED)
        yield from found
    if tried:
        yield _summary("objects", tried, refused, unknown_ones)


def _named(one: Document, install: Install) -> str:
    namespace = one["metadata"]["namespace"]
    return name_of(one) if namespace == install.release.namespace else f"{name_of(one)} in {namespace}"


def _of_owner(name: str, answer: DryRun, release: Release) -> list[Finding]:
    """Helm refuses to take over an object of another owner."""
    owner = (answer.document["metadata"].get("annotations") or {}).get(_OWNER)
    if owner == release.name:
        return []
    detail = f"it exists already and belongs to {f'the release {owner}' if owner else 'no release'}"
    fix = "delete it, or install under another name (--release)"
    return [Finding(name, False, True, detail, fix)]


def _pods(install: Install) -> Iterator[Finding]:
    kind = install.kinds.get("v1/Pod")
    accounts = {one["metadata"]["name"] for one in install.objects if one["kind"] == "ServiceAccount"}
    tried = refused = unknown_ones = 0
    for pod in install.pods:
        if kind is None or pod.namespace in install.absent:
            continue
        answer = install.target.dry_run(_with_account(pod, accounts, install), kind, pod.namespace)
        tried += 1
        if answer.outcome is Outcome.ADMITTED:
            install.admitted[pod.maker] = answer.document
        found = list(_of_answer(f"pod of {pod.maker}", answer, pod.namespace, install))
        refused += any(finding.needed and finding.known for finding in found)
        unknown_ones += answer.outcome in (Outcome.MAY_NOT, Outcome.UNDECIDED)
        yield from found
    if tried:
        yield _summary("pods", tried, refused, unknown_ones)


def _with_account(pod: PlannedPod, accounts: set[str], install: Install) -> Document:
    """The pod with the account `default` if the install has yet to make its own, which no dry run would find."""
    spec = pod.document["spec"]
    name = spec.get("serviceAccountName")
    if name not in accounts:
        return pod.document
    with contextlib.suppress(NotAllowed):
        if install.target.read("serviceaccounts", pod.namespace, name) is not None:
            return pod.document
    return {**pod.document, "spec": {**spec, "serviceAccountName": "default"}}


def _of_answer(name: str, answer: DryRun, namespace: str, install: Install) -> Iterator[Finding]:
    message = plainly(answer.message)
    if answer.outcome is Outcome.REFUSED:
        yield Finding(name, False, True, f"refused: {message}", fix_for(message, namespace))
    elif answer.outcome is Outcome.MAY_NOT:
        install.denied.add(answer.message)
    elif answer.outcome is Outcome.UNDECIDED:
        fix = "ask the owner of that webhook or API, because an install would ask it too"
        yield Finding(name, False, True, f"unknown: {message}", fix, known=False)
    for warning in dict.fromkeys(answer.warnings):
        yield Finding(name, False, False, f"admitted with a warning: {plainly(warning)}", fix_for(warning, namespace))


def _rights(install: Install) -> Iterator[Finding]:
    if install.denied:
        found = {"".join(match.groups()) if (match := _DENIED.search(one)) else one for one in install.denied}
        detail = f"unknown, because this account may not: {', '.join(sorted(found))}"
        fix = "run this with the account that will install, or give this one these rights"
        yield Finding("rights", False, True, detail, fix, known=False)


def _summary(name: str, tried: int, refused: int, unknown_ones: int) -> Finding:
    detail = f"{tried - refused - unknown_ones} of {tried} are admitted"
    if not refused and not unknown_ones:
        return Finding(name, True, True, detail)
    fix = "see the findings about each" if refused else "see what is unknown about each, or the rights"
    return Finding(name, False, True, detail, fix, known=refused > 0)


def _classes(install: Install) -> Iterator[Finding]:
    wanted: dict[str, list[str]] = {}
    for pod in install.pods:
        if name := pod.document["spec"].get("runtimeClassName"):
            wanted.setdefault(name, []).append(pod.maker)
    there = install.target.runtime_classes() if wanted else {}
    for name, makers in wanted.items():
        if name in there:
            yield Finding(f"RuntimeClass {name}", True, True, f"handler {there[name]}, for {', '.join(makers)}")
        else:
            detail = f"it does not exist; there are: {', '.join(sorted(there)) or 'none'}"
            fix = f"make it, or change runtimeClassName in the values, for {', '.join(makers)}"
            yield Finding(f"RuntimeClass {name}", False, True, detail, fix)


def _storage(install: Install) -> Iterator[Finding]:
    claims = [one for one in install.objects if one["kind"] == "PersistentVolumeClaim"]
    classes = {one.name: one for one in install.target.storage_classes()} if claims else {}
    default = next((one for one in classes.values() if one.is_default), None)
    for one in claims:
        name, spec = name_of(one), one["spec"]
        known = classes.get(spec["storageClassName"]) if spec.get("storageClassName") else default
        modes = ", ".join(spec["accessModes"])
        if known is None:
            wanted = spec.get("storageClassName")
            detail = (
                f"no StorageClass {wanted}" if wanted else "it names no StorageClass, and the cluster has no default"
            )
            fix = f"set persistence.storageClass to one of: {', '.join(classes) or 'none is there'}, or make one"
            yield Finding(name, False, True, detail, fix)
        elif {"ReadWriteMany", "ReadOnlyMany"} & set(spec["accessModes"]) and "RWX" not in storage_words(known):
            fix = "a StorageClass whose volumes several nodes mount, or persistence.accessModes=[ReadWriteOnce]"
            detail = f"{modes} of {storage_words(known)}: the API does not tell whether it has that mode"
            yield Finding(name, False, True, detail, fix, known=False)
        else:
            yield Finding(name, True, True, f"{modes} of {storage_words(known)}")


def _needed(install: Install) -> Iterator[Finding]:
    yield from missing_objects(install.pods, install.objects, install.target)


def _nodes(install: Install) -> Iterator[Finding]:
    pods = [to_place(pod, install.admitted.get(pod.maker, pod.document)) for pod in install.pods]
    nodes = install.target.nodes()
    found = judge_nodes(pods, nodes)
    yield from found
    # The pods of a release that is there already have requested their room.
    if all(finding.ok for finding in found) and not install.there:
        yield judge_free(pods, nodes, install.target.requested())


def _quotas(install: Install) -> Iterator[Finding]:
    if install.there:
        return
    for namespace in sorted({pod.namespace for pod in install.pods} - install.absent):
        pods = [
            (pod.count, install.admitted.get(pod.maker, pod.document))
            for pod in install.pods
            if pod.namespace == namespace
        ]
        objects = [one for one in install.objects if one["metadata"]["namespace"] == namespace]
        asked = asked_of_quotas(pods, objects, install.kinds)
        for quota in install.target.quotas(namespace):
            if finding := judge_quota(quota, asked):
                yield replace(finding, name=f"{finding.name} in {namespace}")
